//! An `axum::serve` task on a free loopback port.

use std::net::SocketAddr;

use axum::Router;
use tokio::{net::TcpListener, task::JoinHandle};

/// A running server. Once it is dropped it accepts no more connections, but existing ones continue until the test's
/// runtime ends.
#[derive(Debug)]
pub struct Served {
    /// The address it listens on.
    pub addr: SocketAddr,
    accepting: JoinHandle<()>,
}

/// Serves `router` on `127.0.0.1:0`, over HTTP/1.1 and over HTTP/2 with prior knowledge.
pub async fn serve(router: Router) -> Served {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("bind a free port");
    serve_on(listener, router)
}

/// Serves `router` on the caller's own listener, for tests of socket options.
#[allow(
    clippy::disallowed_methods,
    reason = "a test's server needs its own task"
)]
pub fn serve_on(listener: TcpListener, router: Router) -> Served {
    let addr = listener.local_addr().expect("a bound listener");
    let accepting = tokio::spawn(async move {
        axum::serve(listener, router)
            .await
            .expect("axum::serve runs until it is dropped");
    });
    Served { addr, accepting }
}

// === impl Served ===

impl Drop for Served {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}
