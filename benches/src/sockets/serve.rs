//! A server on real sockets.

use std::{
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::Result;
use axum::{Router, body::Body, serve::ListenerExt};
use http::{Request, Response};
use tokio::{net::TcpSocket, runtime::Handle};
use tower::{ServiceExt, service_fn, util::BoxCloneSyncService};

use crate::{client::CALL, guard::GuardedBody, setup::Server, sockets::ledger::Ledger};

/// Linux's upper limit for a listener's accept queue.
const BACKLOG: u32 = 4096;

/// Serves on `addresses` of this machine's addresses until the runtime ends. Returns them.
///
/// Using several addresses keeps ports and accept queues from being exhausted.
pub fn serve(
    runtime: &Handle,
    addresses: u8,
    server: impl FnOnce() -> Server<Body>,
) -> Result<Vec<SocketAddr>> {
    let _inside = runtime.enter();
    let app = Router::new().nest_service("/mcp", server());
    let listen = |last| {
        let socket = TcpSocket::new_v4()?;
        socket.bind((Ipv4Addr::new(127, 0, 0, last), 0).into())?;
        let listener = socket.listen(BACKLOG)?;
        let address = listener.local_addr()?;
        // Otherwise an answer's last chunk waits for an acknowledgement, which the kernel delays by 40 ms.
        let listener = listener.tap_io(|socket| drop(socket.set_nodelay(true)));
        let server = axum::serve(listener, app.clone());
        runtime.spawn(async move { server.await });
        Ok(address)
    };
    (1..=addresses).map(listen).collect()
}

/// Records when hyper drops a response, before the inner set-up is notified.
pub fn record_drops(server: Server<Body>, ledger: &Ledger) -> Server<Body> {
    let ledger = ledger.clone();
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        let (ledger, call) = (ledger.clone(), call_number(&request));
        let response = server.clone().oneshot(request);
        async move {
            let response = response.await?;
            let Some(call) = call else {
                return Ok(response);
            };
            let recorder = DropRecorder(ledger, call);
            let body = |body| Body::new(GuardedBody::new(body, recorder, drop));
            Ok::<Response<Body>, Infallible>(response.map(body))
        }
    }))
}

fn call_number<A>(request: &Request<A>) -> Option<usize> {
    request.headers().get(CALL)?.to_str().ok()?.parse().ok()
}

/// Records when the response to one call is dropped.
struct DropRecorder(Ledger, usize);

// === impl DropRecorder ===

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0.stamp(&self.0.times_of(self.1).dropped);
    }
}
