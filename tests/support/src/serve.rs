//! An `axum::serve` task on a free port of the loopback interface.

use std::net::SocketAddr;

use axum::Router;
use tokio::{net::TcpListener, task::JoinHandle};

/// A running server. Once dropped it accepts no new connections; existing ones continue until the test's runtime ends.
#[derive(Debug)]
pub struct Served {
    /// The address of its listener.
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

/// Serves `router` on a listener that the caller has set up, for tests of socket options.
#[allow(
    clippy::disallowed_methods,
    reason = "the server of a test needs a task of its own"
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
