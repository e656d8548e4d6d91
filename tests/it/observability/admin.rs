//! The page of `examples/admin`.
//!
//! These tests cover what it shows, who may cancel, and that client text stays text.

use std::convert::Infallible;

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    http::{HeaderMap, Request as HttpRequest, StatusCode, header, request::Builder},
    middleware::from_fn,
    response::Response,
    routing::post,
};
use futures_util::{StreamExt as _, stream};
use mcp_cancel_on_disconnect::{Calls, CancelOnDisconnectLayer, CancelReason, Grace, Outcome};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use self::calls_page::{local_names_only, routes};
use crate::setup::{Plan, Server};

#[path = "../../../examples/admin/calls_page/mod.rs"]
mod calls_page;

const HOST: &str = "127.0.0.1:8769";

/// Everything that a browser could mistake for markup.
const MARKUP: &str = r#"<script>alert(1)</script>'"><img src=x onerror=alert(1)>&lt;"#;

#[tokio::test]
async fn the_page_and_its_json_show_each_call() {
    let (setup, mcp) = Plan::of(Server::Wrapped).grace(Grace::Never).client().await;
    let _attached = setup.start_call(&mcp, 1, "hold", "a").await;
    let detached = setup.start_call(&mcp, "two", "stubborn", "b").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, "two").await;
    detached.fin();
    setup.events.detached(&mcp, "two").await;
    let admin = routes(setup.calls.clone());

    let listing = get(&admin, "/calls.json").await;
    let calls = serde_json::from_str::<Value>(&listing.body).expect("JSON")["calls"].take();
    let page = get(&admin, "/calls").await.body;

    assert_eq!(
        (
            &calls[0]["jsonrpc.request.id"],
            &calls[1]["jsonrpc.request.id"]
        ),
        (&json!(1), &json!("two"))
    );
    assert_eq!(
        (&calls[0]["state"], &calls[1]["state"]),
        (&json!("attached"), &json!("detached"))
    );
    assert_eq!(calls[0]["detached_ms"], Value::Null);
    assert!(calls[1]["detached_ms"].is_u64());
    assert_eq!(calls[1]["grace_left_ms"], Value::Null);
    assert_eq!(calls[0]["mcp.session.id"], calls[1]["mcp.session.id"]);
    for call in calls.as_array().expect("two calls") {
        for name in ["gen_ai.tool.name", "mcp.method.name", "mcp.session.id"] {
            let reply = call[name].as_str().expect("text");
            assert!(page.contains(&format!(">{reply}</")), "{name}: {page}");
        }
        assert!(page.contains(&format!(
            "value=\"{}\"",
            call["call"].as_str().expect("an id")
        )));
    }
    assert!(page.contains("runs on"));
}

#[tokio::test]
async fn a_page_without_calls_has_a_text_for_that() {
    let admin = routes(CancelOnDisconnectLayer::new().calls());
    assert!(
        get(&admin, "/calls")
            .await
            .body
            .contains("No call is in flight")
    );
    let listing = get(&admin, "/calls.json").await.body;
    assert!(listing.ends_with(r#","calls":[]}"#), "{listing}");
}

#[tokio::test]
async fn session_ids_are_not_shown() {
    let (setup, mcp) = Server::Wrapped.client().await;
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    let admin = routes(setup.calls.clone());
    for path in ["/calls", "/calls.json"] {
        let shown = get(&admin, path).await.body;
        assert!(!shown.contains(mcp.session_id().expect("a session")));
    }
}

#[tokio::test]
async fn the_button_cancels_one_call() {
    let (setup, mcp) = Server::Wrapped.client().await;
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;
    let mut other = setup.start_call(&mcp, 2, "hold", "b").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, 2).await;
    let admin = routes(setup.calls.clone());

    let reply = cancel(&admin, &first(&setup.calls), &SAME).await;

    assert_eq!(reply.status, StatusCode::SEE_OTHER);
    assert_eq!(reply.headers[header::LOCATION], "calls");
    let ended = setup.events.ended(&mcp, 1).await;
    assert_eq!(ended, Outcome::Cancelled(CancelReason::Requested));
    assert!(!setup.witness.ended("a").await.is_completed());
    setup.assert_completes("b", &mut other).await;
}

const SAME: [(&str, &str); 2] = [
    ("origin", "http://127.0.0.1:8769"),
    ("sec-fetch-site", "same-origin"),
];

#[tokio::test]
async fn either_header_of_the_same_origin_is_enough() {
    let admin = routes(CancelOnDisconnectLayer::new().calls());
    for header in SAME {
        let reply = cancel(&admin, "7", &[header]).await;
        assert_eq!(reply.status, StatusCode::SEE_OTHER, "{header:?}");
    }
}

#[tokio::test]
async fn a_post_from_anywhere_else_cancels_nothing() {
    let (setup, mcp) = Server::Wrapped.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    let admin = routes(setup.calls.clone());
    let id = first(&setup.calls);
    let (origin, site) = (SAME[0], SAME[1]);

    for headers in [
        vec![],
        vec![("origin", "null")],
        vec![("origin", "http://evil.example")],
        vec![("origin", "http://127.0.0.1")],
        vec![("origin", "http://127.0.0.1:8770")],
        vec![("origin", "http://127.0.0.1:8769.evil.example")],
        vec![("origin", "127.0.0.1:8769")],
        vec![("origin", "file://127.0.0.1:8769")],
        vec![("origin", "")],
        vec![origin, ("origin", "http://evil.example")],
        vec![origin, ("sec-fetch-site", "cross-site")],
        vec![origin, ("sec-fetch-site", "same-site")],
        vec![origin, ("sec-fetch-site", "none")],
        vec![site, ("origin", "http://evil.example")],
        vec![site, site],
        vec![origin, ("host", HOST)],
    ] {
        let reply = cancel(&admin, &id, &headers).await;
        assert_eq!(reply.status, StatusCode::FORBIDDEN, "{headers:?}");
    }
    setup.assert_completes("a", &mut call).await;
}

#[tokio::test]
async fn a_get_cancels_nothing() {
    let (setup, mcp) = Server::Wrapped.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    let admin = routes(setup.calls.clone());
    let id = first(&setup.calls);
    for path in [
        format!("/calls?call={id}"),
        format!("/calls?missed={id}"),
        format!("/calls.json?call={id}"),
    ] {
        let request = request("GET", &path, &SAME).body(Body::from(format!("call={id}")));
        let reply = send(&admin, request.expect("a request")).await;
        assert_eq!(reply.status, StatusCode::OK);
    }
    setup.assert_completes("a", &mut call).await;
}

#[tokio::test]
async fn the_cancel_of_an_ended_call_reports_that_it_has_ended() {
    let admin = routes(CancelOnDisconnectLayer::new().calls());
    let reply = cancel(&admin, "4711", &SAME).await;
    assert_eq!(reply.headers[header::LOCATION], "calls?missed=4711");
    let page = get(&admin, "/calls?missed=4711").await.body;
    assert!(page.contains("Call 4711 was not cancelled"));
    let forged = get(&admin, "/calls?missed=%3Cscript%3E").await;
    assert_eq!(forged.status, StatusCode::BAD_REQUEST);
    assert!(!forged.body.contains("<script>"));
}

#[tokio::test]
async fn a_page_from_before_a_restart_cancels_nothing() {
    let (calls, _open) = held_call("tool").await;
    // This page is from another process, which has given the same number to another call.
    let before = get(&routes(calls.clone()), "/calls").await.body;
    let admin = routes(calls.clone());
    let own = get(&admin, "/calls").await.body;
    let id = first(&calls);

    let reply = press(&admin, &action(&before), &id, &SAME).await;
    assert_eq!(
        reply.headers[header::LOCATION],
        format!("calls?missed={id}")
    );
    assert_eq!(calls.len(), 1);

    let reply = press(&admin, &action(&own), &id, &SAME).await;
    assert_eq!(reply.headers[header::LOCATION], "calls");
    assert_eq!(calls.len(), 0);
}

#[tokio::test]
async fn text_from_clients_is_escaped() {
    let (calls, _open) = held_call(MARKUP).await;
    let admin = routes(calls);
    let page = get(&admin, "/calls").await;
    assert!(page.body.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(
        page.body.contains("&amp;lt;"),
        "what looks escaped is text, too"
    );
    assert_eq!(
        page.body.matches("<script").count(),
        1,
        "the page's own: {}",
        page.body
    );
    assert!(!page.body.contains("<img"));
    let listing = get(&admin, "/calls.json").await;
    assert_eq!(listing.headers[header::CONTENT_TYPE], "application/json");
    let calls: Value = serde_json::from_str(&listing.body).expect("JSON");
    assert_eq!(calls["calls"][0]["gen_ai.tool.name"], MARKUP);
}

#[tokio::test]
async fn long_names_are_cut() {
    let (calls, _open) = held_call(&"ä".repeat(100_000)).await;
    let admin = routes(calls);
    for path in ["/calls", "/calls.json"] {
        let reply = get(&admin, path).await.body;
        assert!(
            reply.len() < 5_000 && reply.contains("ä…"),
            "{path}: {}",
            reply.len()
        );
    }
}

#[tokio::test]
async fn only_the_pages_own_scripts_run() {
    let (calls, _open) = held_call("tool").await;
    let admin = routes(calls);
    for path in [
        "/calls",
        "/calls.json",
        "/calls.css",
        "/calls.js",
        "/calls?missed=x",
    ] {
        let reply = get(&admin, path).await;
        let policy = reply.headers[header::CONTENT_SECURITY_POLICY].to_str();
        let policy = policy.expect("text");
        assert!(policy.starts_with("default-src 'none';"), "{path}");
        assert!(
            !policy.contains("unsafe") && !policy.contains("http"),
            "{policy}"
        );
        assert!(policy.contains("frame-ancestors 'none'"));
        assert_eq!(reply.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    }
    // The policy would block inline code, so the page must not need any.
    let page = get(&admin, "/calls").await.body;
    for inline in [" style=", "<style", " onclick=", "<script>", "//"] {
        assert!(!page.contains(inline), "{inline}: {page}");
    }
}

#[tokio::test]
async fn only_names_of_this_machine_are_answered() {
    let admin = routes(CancelOnDisconnectLayer::new().calls()).layer(from_fn(local_names_only));
    for (host, status) in [
        ("127.0.0.1:8769", StatusCode::OK),
        ("127.0.0.2:8769", StatusCode::OK),
        ("[::1]:8769", StatusCode::OK),
        ("LocalHost", StatusCode::OK),
        ("rebound.example:8769", StatusCode::FORBIDDEN),
        ("192.0.2.1:8769", StatusCode::FORBIDDEN),
        ("127.0.0.1.evil.example", StatusCode::FORBIDDEN),
        ("localhost@evil.example", StatusCode::FORBIDDEN),
        ("", StatusCode::FORBIDDEN),
    ] {
        let request = HttpRequest::get("/calls").header("host", host);
        let reply = send(&admin, request.body(Body::empty()).expect("a request")).await;
        assert_eq!(reply.status, status, "{host}");
    }
}

/// Starts a call that is never answered, on a server that is not an MCP server.
///
/// The call is in flight until its response is dropped.
async fn held_call(tool: &str) -> (Calls, Response) {
    let silent = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b": hello\n\n"))]);
    let handler = async |_: Bytes| {
        let body = Body::from_stream(silent.chain(stream::pending()));
        ([(header::CONTENT_TYPE, "text/event-stream")], body)
    };
    let layer = CancelOnDisconnectLayer::new();
    let calls = layer.calls();
    let app = Router::new().route("/mcp", post(handler)).layer(layer);
    let params = json!({ "name": tool, "arguments": {} });
    let call = json!({ "jsonrpc": "2.0", "id": MARKUP, "method": "tools/call", "params": params });
    let request = HttpRequest::post("/mcp").header("content-type", "application/json");
    let request = request.body(Body::from(call.to_string()));
    let open = app.oneshot(request.expect("a request")).await;
    assert_eq!(calls.len(), 1);
    (calls, open.expect("infallible").map(Body::new))
}

/// A response that has been read in full.
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

async fn get(admin: &Router, path: &str) -> Reply {
    let request = request("GET", path, &[]).body(Body::empty());
    send(admin, request.expect("a request")).await
}

async fn cancel(admin: &Router, id: &str, headers: &[(&str, &str)]) -> Reply {
    press(admin, "/calls", id, headers).await
}

/// Returns the URL to which a page's buttons post.
fn action(page: &str) -> String {
    let (_, action) = page.split_once("action=\"").expect("a form");
    let (action, _) = action.split_once('"').expect("an end");
    format!("/{action}")
}

async fn press(admin: &Router, path: &str, id: &str, headers: &[(&str, &str)]) -> Reply {
    let request = request("POST", path, headers)
        .header("content-type", "application/x-www-form-urlencoded")
        .body(Body::from(format!("call={id}")));
    send(admin, request.expect("a request")).await
}

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Builder {
    let builder = HttpRequest::builder().method(method).uri(path);
    headers
        .iter()
        .fold(builder.header("host", HOST), |builder, (name, value)| {
            builder.header(*name, *value)
        })
}

async fn send(admin: &Router, request: HttpRequest<Body>) -> Reply {
    let response = admin.clone().oneshot(request).await.expect("infallible");
    let (head, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body");
    Reply {
        status: head.status,
        headers: head.headers,
        body: String::from_utf8(body.into()).expect("text"),
    }
}

fn first(calls: &Calls) -> String {
    calls.snapshot()[0].info().id().to_string()
}
