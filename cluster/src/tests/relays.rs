//! A session is open on one instance while its client connects to another.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{ConnectInfo, Request},
    middleware::map_response,
    response::Response,
    routing::any,
};
use http::HeaderValue;
use mcp_cancel_on_disconnect::{Grace, socket::Peer};
use rmcp::model::ServerRequest;
use serde_json::{Value, json};
use test_support::{Connection, within};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    time::{Instant, sleep},
};
use tower_service::Service as _;

use super::{
    log_lines::Warnings,
    node::{Node, SECRET, Setup},
    steps::{SECOND, directory, post_echo, run_other_tasks, status},
};
use crate::membership::heartbeat::SETTLE_PERIOD;

#[tokio::test]
async fn a_call_and_its_answer_pass_through_another_instance() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let mcp = b.client_of(&a.session().await);

    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    let head = call.head().await;
    assert_eq!((head.status, head.is_event_stream()), (200, true));
    assert!(
        head.headers
            .keys()
            .all(|name| !name.as_str().starts_with("mcp-cluster"))
    );
    a.witness.started("a").await;
    assert_eq!(b.witness.starts("a"), 0);
    a.witness.release("a");
    let answer = call.answer().await.unwrap();
    assert!(
        answer["result"]["content"][0]["text"]
            .as_str()
            .unwrap()
            .starts_with("done:a")
    );

    a.assert_received_no_cluster_header();
}

#[tokio::test]
async fn a_client_resumes_through_another_instance() {
    let (_directory, [a, b, c], mcp) = Node::with_session().await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    let event = call.event().await.unwrap();
    a.witness.started("a").await;
    call.fin();

    let mut resumed = b.client_of(&mcp).resume(event.id.as_deref().unwrap()).await;
    assert_eq!(resumed.head().await.status, 200);
    resumed.fin();
    let mut resumed = c.client_of(&mcp).resume(event.id.as_deref().unwrap()).await;
    assert_eq!(resumed.head().await.status, 200);
    a.witness.release("a");
    assert_eq!(resumed.answer_event().await.unwrap().json()["id"], 1);
    assert!(a.witness.ended("a").await.is_completed());
}

#[tokio::test]
async fn a_cancel_and_a_delete_arrive_through_another_instance() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let _call = mcp.call(1, "hold", json!({ "label": "cancelled" })).await;
    a.witness.started("cancelled").await;
    assert_eq!(b.client_of(&mcp).cancel(1).await, 202);
    assert!(a.witness.ended("cancelled").await.is_cancelled());

    let _call = mcp.call(2, "hold", json!({ "label": "deleted" })).await;
    a.witness.started("deleted").await;
    assert_eq!(b.client_of(&mcp).delete().await, 202);
    assert!(a.witness.ended("deleted").await.is_cancelled());
    assert!(!a.has(&mcp));
}

#[tokio::test]
async fn the_answer_to_a_server_request_arrives_through_another_instance() {
    let directory = directory();
    let (sender, mut answers) = mpsc::unbounded_channel::<Value>();
    let a = Setup {
        on_start: Some(Box::new(move |_, context| {
            let (peer, sender) = (context.peer.clone(), sender.clone());
            tokio::spawn(async move {
                let answer = peer.send_request(question()).await.unwrap();
                sender.send(serde_json::to_value(answer).unwrap()).unwrap();
            });
        })),
        ..Setup::default()
    };
    let a = a.start(&directory).await;
    let b = Node::start(&directory).await;
    let mcp = a.session().await;
    let at_b = b.client_of(&mcp);
    let mut listening = at_b.listen().await;
    assert_eq!(listening.head().await.status, 200);
    let _call = at_b.call(1, "hold", json!({ "label": "a" })).await;
    let question = loop {
        let event = listening.event().await.unwrap();
        if !event.is_priming() {
            break event.json();
        }
    };
    assert_eq!(question["method"], "sampling/createMessage");
    let content = json!({ "type": "text", "text": "a reply" });
    let result = json!({ "role": "assistant", "model": "a model", "content": content });
    let answer = json!({ "jsonrpc": "2.0", "id": question["id"], "result": result });
    assert_eq!(at_b.post_raw(answer.to_string(), &[]).await.status, 202);
    let answer = within("the handler's answer", answers.recv())
        .await
        .unwrap();
    assert_eq!(answer["content"]["text"], "a reply");
}

fn question() -> ServerRequest {
    let params = json!({
        "maxTokens": 9,
        "messages": [{ "role": "user", "content": { "type": "text", "text": "a question" } }],
    });
    serde_json::from_value(json!({ "method": "sampling/createMessage", "params": params })).unwrap()
}

/// The relay is dropped along with its client, so the owner detects the disconnect at once rather than on its next write.
#[tokio::test]
async fn a_disconnect_at_the_relay_reaches_the_owner() {
    let directory = directory();
    let a = Setup {
        grace: Grace::Immediate,
        ..Setup::default()
    };
    let a = a.start(&directory).await;
    let b = Node::start(&directory).await;
    let mcp = b.client_of(&a.session().await);
    let mut slowest = Duration::ZERO;
    for (id, is_reset) in [(1, false), (2, true), (3, false), (4, true)] {
        let label = format!("call {id}");
        let mut call = mcp.call(id, "hold", json!({ "label": label })).await;
        call.head().await;
        a.witness.started(&label).await;
        let started = Instant::now();
        if is_reset {
            call.rst();
        } else {
            call.fin();
        }
        assert!(a.witness.ended(&label).await.is_cancelled());
        slowest = slowest.max(started.elapsed());
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

/// The inner application can read the client's address and watch its connection, in both of the ways that axum offers.
#[tokio::test]
async fn a_relayed_request_has_the_address_and_the_connection_of_its_client() {
    let (_directory, [a], mcp) = Node::with_session().await;
    let (received, disconnected) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (on_disconnected, on_received) = (disconnected.clone(), received.clone());
    let handler = async move |ConnectInfo(addr): ConnectInfo<SocketAddr>,
                              ConnectInfo(peer): ConnectInfo<Peer>,
                              request: Request| {
        let plain: &Peer = request.extensions().get().unwrap();
        let addresses = format!("{addr} {} {}", peer.addr(), plain.addr());
        if request.method() == http::Method::DELETE {
            on_received.notify_one();
            peer.closed().await;
            on_disconnected.notify_one();
        }
        addresses
    };
    let app = Router::new().route("/mcp", any(handler));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (cluster, app) = (a.cluster.clone(), app.layer(a.cluster.layer()));
    tokio::spawn(async move { cluster.serve_peers(listener, app).await });

    let client = "192.0.2.1:4711";
    let request = mcp
        .get_request()
        .header("mcp-cluster", SECRET)
        .header("mcp-cluster-client", client);
    let reply = Connection::fetch(address, &request).await;
    assert_eq!(reply.text(), format!("{client} {client} {client}"));

    let mut client_connection = Connection::open(address).await;
    let request = test_support::Request::new("DELETE", "/mcp")
        .header("mcp-session-id", mcp.session_id().unwrap())
        .header("mcp-cluster", SECRET)
        .header("mcp-cluster-client", client);
    client_connection.send(&request).await;
    within("the request", received.notified()).await;
    // Once it has buffered more than one request, hyper stops reading and cannot detect that the connection has ended.
    client_connection.write(b"GET").await;
    client_connection.fin();
    within("the disconnect", disconnected.notified()).await;
}

#[tokio::test]
async fn a_disconnect_before_the_head_reaches_the_owner() {
    let directory = directory();
    let [_, b] = Node::several(&directory).await;
    let mut owner = super::fake_owner::FakeOwner::new(&directory).await;
    let mcp = owner.session(&b).await;
    let call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    let request = owner.request().await;
    assert!(request.head.starts_with("POST /mcp "));
    call.fin();
    request.until_closed().await;
}

#[tokio::test]
async fn a_local_session_is_served_without_the_directory() {
    let (directory, [_a, b], mcp) = Node::with_session().await;
    let count = || {
        directory.request_count("look_up")
            + directory.request_count("load")
            + directory.request_count("claim")
    };
    let before = count();
    for id in 0..10 {
        let mut call = mcp.call(id, "echo", json!({ "text": "hello" })).await;
        assert_eq!(call.answer().await.unwrap()["id"], id);
    }
    assert_eq!(count(), before);

    // A relayed session is looked up only once.
    let at_b = b.client_of(&mcp);
    for id in 10..20 {
        let mut call = at_b.call(id, "echo", json!({ "text": "hello" })).await;
        assert_eq!(call.answer().await.unwrap()["id"], id);
    }
    assert_eq!(count(), before + 1);
}

/// Clients can send such heads over HTTP/2.
#[tokio::test]
async fn a_head_with_many_fields_is_passed_through_or_refused_with_a_reason() {
    let directory = directory();
    let [a, mut b] = Node::several(&directory).await;
    let mcp = b.client_of(&a.session().await);
    let warnings = Warnings::watch();
    for (count, expected) in [(280, 200), (504, 200), (505, 431), (2_000, 431)] {
        let mut request = post_echo(&mcp, 1);
        while request.headers().len() < count {
            let value = HeaderValue::from_static("a");
            request.headers_mut().append("x-many", value);
        }
        let response = b.app.call(request).await.unwrap();
        assert_eq!(response.status(), expected, "{count}");
    }
    assert_eq!(warnings.count(""), 0);
}

/// rmcp uses the first of the two, and so does the routing to the owner.
#[tokio::test]
async fn a_session_that_is_named_twice_is_the_same_everywhere() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let id = mcp.session_id().unwrap();
    for (first, second, expected) in [(id, id, 200), (id, "another", 200), ("another", id, 404)] {
        for node in [&a, &b] {
            let twice = node.client(first).header("mcp-session-id", second);
            assert_eq!(status(&twice, 1).await, expected, "{second}");
        }
    }
    assert!(a.has(&mcp) && !b.has(&mcp));
}

#[tokio::test]
async fn large_requests_and_answers_arrive_whole() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let mcp = b.client_of(&a.session().await);
    for length in [0, 1, 64 * 1024, 300_000, 2_000_000] {
        let text: String = ('a'..='z').cycle().take(length).collect();
        let mut call = mcp.call(length, "echo", json!({ "text": text })).await;
        let answer: Value = call.answer().await.unwrap();
        assert!(answer["result"]["content"][0]["text"] == text, "{length}");
    }
    assert_eq!(b.routing().sessions.len(), 0);
    assert!(a.has(&mcp));
}

/// Adds this many fields to each response.
fn with_fields<const FIELDS: usize>(app: Router) -> Router {
    app.layer(map_response(async |mut response: Response| {
        for index in 0..FIELDS {
            let cookie = format!("c{index}=1").parse().unwrap();
            response.headers_mut().append("set-cookie", cookie);
        }
        response
    }))
}

#[tokio::test]
async fn a_response_with_many_fields_is_relayed() {
    for inner_layers in
        [with_fields::<80>, with_fields::<120>, with_fields::<480>] as [fn(_) -> _; 3]
    {
        let directory = directory();
        let setup = Setup {
            inner_layers,
            ..Setup::default()
        };
        let a = setup.start(&directory).await;
        let b = Node::start(&directory).await;
        b.until_settled().await;
        let mcp = a.session().await;
        assert_eq!(status(&mcp, 1).await, 200, "direct");
        let at_b = b.client_of(&mcp);
        let mut call = at_b.call(2, "hold", json!({ "label": "held" })).await;
        assert_eq!(call.head().await.status, 200);
        run_other_tasks().await;
        assert_eq!(a.witness.starts("held"), 1);
    }
}

/// README, "Limits": a relayed call's client counts as disconnected if it reads nothing for 90 s, but not at the owner.
///
/// Neither the layer nor the public listener has a time limit.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 140 s"]
async fn a_client_that_does_not_read_for_90_s_keeps_its_call_only_at_its_owner() {
    let directory = directory();
    let a = Setup::with_grace().start(&directory).await;
    let b = Node::start(&directory).await;
    sleep(SETTLE_PERIOD).await;
    let mut clients = Vec::new();
    for (label, node) in [("a", &a), ("b", &b)] {
        let mcp = a.session().await;
        let addr = node.public.as_ref().unwrap().addr;
        let mut client = Connection::open_with_receive_buffer(addr, 16 * 1024).await;
        // More events than all of the buffers can hold.
        let arguments = json!({ "label": label, "events": 300_000 });
        let at_node = node.client_of(&mcp);
        client
            .send(&at_node.call_request(label, "chatty", arguments))
            .await;
        assert_eq!(client.head().await.status, 200);
        client.event().await.unwrap();
        clients.push(client);
    }
    sleep(60 * SECOND).await;
    assert!(["a", "b"].map(|label| a.witness.is_running(label)) == [true, true]);
    sleep(70 * SECOND).await;
    let running = ["a", "b"].map(|label| a.witness.is_running(label));
    assert_eq!(running, [true, false]);
}

/// Otherwise its connections to the owner, in TIME_WAIT, could use up its ports.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn ended_relays_do_not_use_up_ports_of_the_relaying_instance() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let client = b.client_of(&mcp);
    for id in 0..300 {
        let mut call = client.call(id, "echo", json!({ "text": "x" })).await;
        within("an answer", call.answer()).await.unwrap();
        let _ = within("the response to end", call.body_to_end()).await;
    }
    let port = format!("{:04X}", a.me.address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let waiting = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        (state == "06").then(|| (local.ends_with(&port), remote.ends_with(&port)))
    });
    let (mut of_owner, mut of_relay) = (0, 0);
    for (is_owner, is_relay) in waiting {
        of_owner += u32::from(is_owner);
        of_relay += u32::from(is_relay);
    }
    assert!(of_owner > 200 && of_relay < 30, "{of_owner} {of_relay}");
}
