//! Requests delayed by a layer or the directory while their session is closed, restored or claimed.

use std::convert::Infallible;

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use futures_util::FutureExt as _;
use serde_json::json;
use test_support::{Connection, Mcp, within};
use tokio::{task::yield_now, time::sleep};
use tower_service::Service as _;

use super::{
    node::{GRACE, Node, Setup, pass},
    steps::{MS, SECOND, close_session, directory, post, run_other_tasks, status},
};
use crate::directory::{
    MemoryDirectory,
    faulty::{Fault, Faulty},
};

/// Adds a layer that delays each resume by 8 s, as if authenticating the client.
///
/// It is inside the cluster's layer.
fn with_slow_resumes(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        if request.headers().contains_key("last-event-id") {
            sleep(8 * SECOND).await;
        }
        Ok::<_, Infallible>(next.run(request).await)
    }))
}

/// The client resumes 1 s before its grace period ends.
#[tokio::test]
async fn a_client_whose_resume_a_layer_delays_keeps_its_call() {
    let mut results = Vec::new();
    for is_through_b in [true, false] {
        let directory = Faulty::new(MemoryDirectory::default());
        let setup = Setup {
            inner_layers: with_slow_resumes,
            ..Setup::with_grace()
        };
        let a = setup.start(&directory).await;
        let b = Node::start(&directory).await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        pass(SECOND).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        pass(GRACE - SECOND).await;
        let client = if is_through_b {
            b.client_of(&mcp)
        } else {
            a.client_of(&mcp)
        };
        let mut resumed = client.resume(&last_event_id).await;
        pass(9 * SECOND).await;
        let status = resumed.head().await.status;
        results.push((is_through_b, status, a.witness.is_running("a")));
    }
    assert_eq!(results, [(true, 200, true), (false, 200, true)]);
}

/// The client cancels the call over a connection that it still has to the instance that is shutting down.
#[tokio::test]
async fn a_waiting_call_cancelled_at_the_instance_in_shutdown_does_not_run() {
    for is_direct in [false, true] {
        let (_directory, [a, b], mcp) = Node::with_session().await;
        let at_b = b.client_of(&mcp);
        let mut first = a.start_call(&at_b, 1, "first").await;
        let _shutdown = a.routing().shutdown.begin();
        let mut second = at_b.call(2, "hold", json!({ "label": "second" })).await;
        run_other_tasks().await;
        assert!(second.head().now_or_never().is_none(), "the call waits");
        let canceller = if is_direct { &mcp } else { &at_b };
        assert_eq!(canceller.cancel(2).await, 202);
        run_other_tasks().await;
        a.witness.release("first");
        assert!(within("an answer", first.answer()).await.is_some());
        pass(3 * SECOND).await;
        assert!(
            !b.witness.is_running("second") && !a.witness.is_running("second"),
            "the cancelled call is running, direct: {is_direct}"
        );
    }
}

/// Writing an answer takes 700 ms, and so does reading it.
#[tokio::test]
async fn an_answer_that_could_be_written_can_be_read() {
    for (is_read_slow, expected) in [(false, 200), (true, 200)] {
        let memory = MemoryDirectory::default();
        let [link_a, link_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
        let mut a = Node::start(&link_a).await;
        let b = Node::start(&link_b).await;
        a.until_settled().await;
        b.until_settled().await;
        link_a.set(Fault::SlowAt("keep_answer", 700 * MS));
        if is_read_slow {
            link_b.set(Fault::SlowAt("answer", 700 * MS));
        }
        let mcp = a.session().await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        a.witness.release("a");
        pass(3 * SECOND).await;
        a.kill_and_expire().await;
        pass(2 * SECOND).await;
        let at_b = b.client_of(&mcp);
        assert_eq!(status(&at_b, 2).await, 200);
        let mut last_status = 0;
        for _ in 0..5 {
            let mut resumed = at_b.resume(&last_event_id).await;
            pass(2 * SECOND).await;
            last_status = resumed.head().await.status;
            if last_status == 200 {
                assert_eq!(resumed.answer().await.unwrap()["id"], 1);
                break;
            }
            pass(2 * SECOND).await;
        }
        assert_eq!(last_status, expected, "{is_read_slow}");
    }
}

/// Adds the layers of an application that checks its MCP clients, but accepts reports from anyone.
fn with_public_reports(app: Router) -> Router {
    let checked = app.layer(from_fn(async |request: Request, next: Next| {
        let user = request.headers().get("authorization");
        let is_bob = user.is_some_and(|user| user == "Bearer bob");
        Ok::<_, Infallible>(if is_bob {
            http::StatusCode::FORBIDDEN.into_response()
        } else {
            next.run(request).await
        })
    }));
    checked.merge(Router::new().route("/report", axum::routing::post(async || "thanks")))
}

/// Alice's call is waiting for its session to be transferred. Bob knows that session's id and sends a cancellation to another path.
#[tokio::test]
async fn a_cancel_at_another_path_does_not_cancel_a_waiting_call() {
    let directory = directory();
    let [a, b] = Setup::start_pair(&directory, with_public_reports).await;
    let mcp = a.session().await;
    let at_b = b.client_of(&mcp);
    let _first = a.start_call(&at_b, 1, "first").await;
    let _shutdown = a.routing().shutdown.begin();
    let mut second = at_b.call(2, "echo", json!({ "text": "x" })).await;
    run_other_tasks().await;
    let cancel = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": 2 },
    });
    for (path, status) in [("/mcp", 403), ("/report", 200)] {
        let mut request = post(&mcp, &cancel);
        *request.uri_mut() = path.parse().unwrap();
        let bob = "Bearer bob".parse().unwrap();
        request.headers_mut().insert("authorization", bob);
        let response = b.app.clone().call(request).await.unwrap();
        assert_eq!(response.status(), status);
    }
    run_other_tasks().await;
    a.witness.release("first");
    let head = within("a response head", second.head()).await;
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    let answer = within("an answer", second.answer()).await.unwrap();
    assert!(answer["result"].is_object(), "{answer}");
}

/// A layer between the cluster's and rmcp's holds a resume for 8 s. In the meantime its session is closed, and a call restores it.
#[tokio::test]
async fn a_resume_that_a_layer_delays_does_not_get_events_of_another_call() {
    let directory = directory();
    let setup = Setup {
        inner_layers: with_slow_resumes,
        ..Setup::default()
    };
    let a = setup.start(&directory).await;
    a.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let mut resumed = mcp.resume(&last_event_id).await;
    pass(SECOND).await;
    close_session(&a, &mcp).await;
    let mut other = mcp.call(2, "hold", json!({ "label": "b" })).await;
    assert_eq!(within("a response head", other.head()).await.status, 200);
    a.witness.started("b").await;
    other.event().await.unwrap();
    pass(9 * SECOND).await;
    let status = within("a response head", resumed.head()).await.status;
    a.witness.release("b");
    let answer = tokio::time::timeout(3 * SECOND, resumed.answer()).await;
    let received = answer.ok().flatten().map(|answer| answer["id"].clone());
    assert_ne!(received, Some(json!(2)), "{status}");
    let other = tokio::time::timeout(3 * SECOND, other.answer()).await;
    assert_eq!(other.unwrap().unwrap()["id"], 2);
}

/// Adds a layer that delays each request with an `x-slow` header by 1 s.
fn with_slow_requests(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        if request.headers().contains_key("x-slow") {
            sleep(SECOND).await;
        }
        Ok::<_, Infallible>(next.run(request).await)
    }))
}

/// Opens a session on an instance with `with_slow_requests`.
///
/// Returns the instance, its client, and one whose requests are delayed.
async fn start_with_delays(directory: &Faulty) -> (Node, Mcp, Mcp) {
    let setup = Setup {
        inner_layers: with_slow_requests,
        ..Setup::default()
    };
    let node = setup.start(directory).await;
    node.until_settled().await;
    let mcp = node.session().await;
    let slow = node.client_of(&mcp).header("x-slow", "1");
    (node, mcp, slow)
}

/// A layer on A delays a call for 1 s, and in the meantime A closes its session, as happens to idle ones. rmcp would restore the session
/// for the call, although A has not claimed it. A peer that requests the session gets 421 and claims it.
#[tokio::test]
async fn a_call_that_a_layer_delays_does_not_begin_in_a_session_of_another_instance() {
    let directory = directory();
    let (a, mcp, slow) = start_with_delays(&directory).await;
    let b = Node::start(&directory).await;
    b.until_settled().await;
    let mut call = slow.call(1, "hold", json!({ "label": "a" })).await;
    pass(500 * MS).await;
    close_session(&a, &mcp).await;
    pass(SECOND).await;
    assert_eq!(status(&b.client_of(&mcp), 2).await, 200);
    assert!(b.has(&mcp));
    let head = within("a response head", call.head()).await.status;
    assert_eq!((head, a.witness.starts("a")), (503, 0));
}

/// Another request in the session is still waiting for its body. It has not claimed the session yet, so it restores nothing for the call.
#[tokio::test]
async fn a_call_that_a_layer_delays_does_not_restore_a_session_that_another_request_is_about_to_claim()
 {
    let directory = directory();
    let (a, mcp, slow) = start_with_delays(&directory).await;
    let mut call = slow.call(1, "hold", json!({ "label": "a" })).await;
    pass(500 * MS).await;
    close_session(&a, &mcp).await;
    let mut half = Connection::open(a.public.as_ref().unwrap().addr).await;
    half.send_chunked_head(&mcp.call_request(7, "hold", json!({ "label": "half" })))
        .await;
    while a.routing().restores.is_empty() {
        yield_now().await;
    }
    pass(SECOND).await;
    let head = within("a response head", call.head()).await.status;
    assert_eq!((head, a.witness.starts("a")), (503, 0));
}

/// A layer delays two requests, and in the meantime their session is closed, as happens to idle ones. rmcp makes the second wait for the
/// first, which restores nothing.
#[tokio::test]
async fn both_requests_that_a_layer_delays_must_be_sent_again() {
    let directory = directory();
    let (a, mcp, slow) = start_with_delays(&directory).await;
    let last_event_id = a.detach(&mcp, 3, "a").await;
    a.witness.release("a");
    let mut first = slow.call(1, "echo", json!({ "text": "x" })).await;
    let mut second = slow.call(2, "echo", json!({ "text": "x" })).await;
    let mut resumed = slow.resume(&last_event_id).await;
    pass(500 * MS).await;
    close_session(&a, &mcp).await;
    directory.set(Fault::SlowAt("load", 200 * MS));
    pass(SECOND).await;
    for request in [&mut first, &mut second, &mut resumed] {
        let head = within("a response head", request.head()).await;
        assert_eq!(
            (head.status, head.header("retry-after").is_some()),
            (503, true)
        );
    }
    assert_eq!(status(&mcp, 4).await, 200);
}
