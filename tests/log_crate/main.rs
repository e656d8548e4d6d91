//! Without a `tracing` subscriber, a `log` crate logger receives all lines.
//!
//! This is a separate binary, because the logger is global and the process must never have set a subscriber.

#![allow(
    clippy::expect_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

use std::sync::Mutex;

use axum::{Router, body::Body, body::to_bytes, http::Request, routing::post};
use log::{LevelFilter, Log, Metadata, Record};
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use tower::ServiceExt;

const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#;

/// Keeps this crate's lines.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

// === impl Lines ===

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        if record.target() == "mcp_cancel_on_disconnect" {
            let mut lines = self.0.lock().expect("no panic");
            lines.push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

// tower's `log` feature, which axum enables, is tracing's.
#[tokio::test]
async fn a_log_crate_logger_receives_every_line() {
    log::set_logger(&LINES).expect("no other logger");
    log::set_max_level(LevelFilter::Trace);
    let layer = CancelOnDisconnectLayer::new();
    let answer = async |_request: String| ([("content-type", "application/json")], "{}");
    let app = Router::new().route("/mcp", post(answer)).layer(layer);
    let request = Request::post("/mcp").header("content-type", "application/json");
    let request = request.body(Body::from(CALL)).expect("a request");
    let response = app.oneshot(request).await.expect("infallible");
    to_bytes(response.into_body(), usize::MAX)
        .await
        .expect("a body");
    let lines = LINES.0.lock().expect("no panic");
    let has = |text: &str| lines.iter().any(|line| line.starts_with(text));
    assert!(has("call started") && has("call completed"), "{lines:?}");
}
