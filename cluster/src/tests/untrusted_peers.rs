//! Requests and answers that were not sent by a peer of the cluster.

use std::net::IpAddr;

use axum::{Router, body::Body, routing::any};
use futures_util::future::join;
use serde_json::json;
use test_support::{Connection, Request};

use super::{
    fake_owner::FakeOwner,
    node::{Node, SECRET, Setup, call_app},
    steps::{directory, status},
};
use crate::relay::filter::PeersFilter;

/// Returns a request to the peer listener with the given headers.
fn request_with(mcp: &test_support::Mcp, fields: &[(&str, &str)]) -> Request {
    mcp.call_request(1, "echo", json!({ "text": "x" }))
        .headers(fields.iter().copied())
}

#[tokio::test]
async fn a_client_cannot_impersonate_a_peer() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    for value in [SECRET, "relay", "moved", ""] {
        let forged = b
            .client_of(&mcp)
            .header("mcp-cluster", value)
            .header("mcp-cluster-client", "10.9.9.9:1");
        let mut call = forged.call(1, "echo", json!({ "text": "x" })).await;
        assert_eq!(call.answer().await.unwrap()["id"], 1, "{value}");
        let forged = a.client_of(&mcp).header("mcp-cluster", value);
        let mut call = forged.call(2, "echo", json!({ "text": "x" })).await;
        assert_eq!(call.answer().await.unwrap()["id"], 2, "{value}");
    }
    a.assert_received_no_cluster_header();
}

#[tokio::test]
async fn the_peer_listener_accepts_only_the_secret() {
    let (_directory, [a], mcp) = Node::with_session().await;
    for fields in [
        &[][..],
        &[("mcp-cluster", "relay")],
        &[("mcp-cluster", SECRET), ("mcp-cluster", SECRET)],
    ] {
        let reply = Connection::fetch(a.me.address, &request_with(&mcp, fields)).await;
        assert_eq!(
            (reply.status, reply.headers.get("mcp-cluster")),
            (403, None),
            "{fields:?}"
        );
    }
    let fields = [("mcp-cluster", SECRET)];
    let reply = Connection::fetch(a.me.address, &request_with(&mcp, &fields)).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.headers["mcp-cluster"], a.me.incarnation.to_string());
}

/// A peer's request for a session that is not local is not looked up, relayed or started.
///
/// The peer gets 421 before it sends the body.
#[tokio::test]
async fn a_relay_is_never_relayed() {
    let (directory, [_a, b], mcp) = Node::with_session().await;
    let lookups = directory.request_count("look_up");
    let without_session = test_support::Mcp::stateless(b.me.address, test_support::PATH);
    for mcp in [&mcp, &b.client("unknown"), &without_session] {
        let reply =
            Connection::fetch(b.me.address, &request_with(mcp, &[("mcp-cluster", SECRET)])).await;
        assert_eq!(
            (reply.status, reply.headers["mcp-cluster"].to_str().unwrap()),
            (421, &*format!("moved {}", b.me.incarnation))
        );
    }
    let mut cut = Connection::open(b.me.address).await;
    let request = request_with(&mcp, &[("mcp-cluster", SECRET)]);
    cut.send_cut(&request, 1_000_000).await;
    assert_eq!(cut.head().await.status, 421);
    assert_eq!(directory.request_count("look_up"), lookups);
}

#[tokio::test]
async fn an_owner_with_another_secret_is_not_a_peer() {
    let directory = directory();
    let a = Setup {
        secret: "another secret",
        ..Setup::default()
    };
    let a = a.start(&directory).await;
    let b = Node::start(&directory).await;
    let mcp = a.session().await;
    let reply = b.client_of(&mcp).post_raw("{}", &[]).await;
    assert_eq!(
        (reply.status, reply.headers["retry-after"].as_bytes()),
        (503, &b"1"[..])
    );
    assert!(a.has(&mcp) && !b.has(&mcp));
}

/// During a rolling restart, instances from successive steps are members at the same time.
#[tokio::test]
async fn a_secret_is_changed_by_rolling_restarts() {
    let steps = [
        ("old", None),
        ("old", Some("new")),
        ("new", Some("old")),
        ("new", None),
    ];
    let setup = |(secret, also_accepts)| Setup {
        secret,
        also_accepts,
        ..Setup::default()
    };
    for (step, other) in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)] {
        let directory = directory();
        let a = setup(steps[step]).start(&directory).await;
        let b = setup(steps[other]).start(&directory).await;
        let mcp = b.client_of(&a.session().await);
        assert_eq!(status(&mcp, 1).await, 200, "{step} {other}");
    }
}

#[tokio::test]
async fn a_response_that_is_not_from_a_peer_is_discarded() {
    let (_directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 421 Misdirected Request\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nmcp-cluster: moved 0123456789abcdef\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 421 Misdirected Request\r\nmcp-cluster: moved\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\nmcp-cluster: 0123456789ABCDEF\r\ncontent-length: 0\r\n\r\n",
    ] {
        let (mut listening, mut request) = join(mcp.listen(), owner.request()).await;
        request.write(answer).await;
        let head = listening.head().await;
        assert_eq!(
            (head.status, head.header("retry-after")),
            (503, Some("1")),
            "{answer}"
        );
    }
}

/// A client that can write to the directory must not be able to choose where requests are sent.
#[tokio::test]
async fn no_request_is_sent_to_an_address_that_is_not_allowed_for_peers() {
    let directory = directory();
    let mut owner = FakeOwner::new(&directory).await;
    let address = owner.me.address.ip();
    let b = Setup {
        filter: PeersFilter::new(move |other: IpAddr| other != address),
        ..Setup::default()
    };
    let b = b.start(&directory).await;
    let mcp = owner.session(&b).await;
    let reply = mcp.post_raw("{}", &[]).await;
    assert_eq!(reply.status, 503);
    // Nor is a connection from that address accepted.
    let mut refused = Connection::open(b.me.address).await;
    assert_eq!(refused.closed().await, "");
    // This is the first request that the owner receives.
    let other = Node::start(&directory).await;
    let through = other
        .client(mcp.session_id().unwrap())
        .header("x-second", "1");
    let (_listening, request) = join(through.listen(), owner.request()).await;
    assert!(request.head.contains("x-second"));
}

#[tokio::test]
async fn an_id_of_a_megabyte_does_not_match_a_session() {
    let directory = directory();
    let [a] = Node::several(&directory).await;
    let app = Router::new().route("/mcp", any(async || "served"));
    let long = "x".repeat(1024 * 1024);
    let request = |session: &str| {
        let request = http::Request::get("/mcp").header("mcp-session-id", session);
        request.body(Body::empty()).unwrap()
    };
    // The application may deny the session, because the directory is consistent.
    let response = call_app(&a, app.clone(), request(&long)).await;
    assert_eq!(response.status(), 200);
    let new_instance = Node::start(&directory).await;
    let response = call_app(&new_instance, app, request(&format!("{long}y"))).await;
    assert_eq!(response.status(), 503);
    assert_eq!(
        a.routing().sessions.len() + new_instance.routing().sessions.len(),
        0
    );
}
