//! Code shared by the tests: the proxy, in this process or as a program, and a server behind it.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

mod program;
mod proxy;
mod upstream;

pub(crate) use self::{
    program::Program,
    proxy::Running,
    upstream::{ReceivedRequest, Upstream},
};
pub(crate) use test_support::*;

/// Longer than the window in which the program takes two signals for one.
pub(crate) const REPEAT_WINDOW: Duration = Duration::from_millis(600);

/// Returns a call in revision 2026-07-28, which has no sessions.
pub(crate) fn stateless_call(id: &str) -> Request {
    post(&call(id)).header("mcp-protocol-version", "2026-07-28")
}

/// Returns a call in the session "s".
pub(crate) fn session_call(id: &str) -> Request {
    post(&call(id))
        .header("mcp-protocol-version", "2025-11-25")
        .header("mcp-session-id", "s")
}

/// Returns a resume in the session "s".
#[allow(dead_code, reason = "not all tests need it")]
pub(crate) fn resume_after(event: &str) -> Request {
    Request::new("GET", "/mcp")
        .header("accept", "text/event-stream")
        .header("mcp-session-id", "s")
        .header("last-event-id", event)
}

/// Returns the message that calls the tool `work`, with an id given as JSON text.
pub(crate) fn call(id: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"work"}}}}"#)
}

/// Returns a POST to `/mcp`.
pub(crate) fn post(body: &str) -> Request {
    Request::new("POST", "/mcp")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(body.to_owned())
}

/// Returns a loopback address with a free port.
///
/// Port 0 would not do, because some tests cannot read the chosen port from the log. The kernel assigns no ports below 32,768 to
/// connections, so this one is still free when the program starts to listen.
pub(crate) fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + u16::try_from(std::process::id() % 20_000).expect("below 20,000");
    loop {
        let port = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        if std::net::TcpListener::bind(addr).is_ok() {
            return addr;
        }
    }
}
