//! A server on real sockets.

use std::{
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
};

use axum::{Router, body::Body, serve::ListenerExt};
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::{net::TcpSocket, task::JoinSet};
use tower::{ServiceExt, service_fn, util::BoxCloneSyncService};

use crate::{
    Failure,
    setup::Server,
    sockets::ledger::{Ledger, Life},
};

/// The header that says which call a request is about.
pub const CALL: &str = "x-call";

/// What Linux allows a listener to keep waiting, at most.
const BACKLOG: u32 = 4096;

/// Listens on as many addresses of this machine, so that neither ports nor accept queues run out. The
/// server ends with the set.
pub fn serve(
    server: Server<Body>,
    addresses: u8,
) -> Result<(Vec<SocketAddr>, JoinSet<()>), Failure> {
    let app = Router::new().nest_service("/mcp", server);
    let mut tasks = JoinSet::new();
    let addresses = (1..=addresses).map(|last| {
        let socket = TcpSocket::new_v4()?;
        socket.bind((Ipv4Addr::new(127, 0, 0, last), 0).into())?;
        let listener = socket.listen(BACKLOG)?;
        let address = listener.local_addr()?;
        // Else the last chunk of an answer waits for an acknowledgement, which the kernel delays by 40 ms.
        let listener = listener.tap_io(|socket| drop(socket.set_nodelay(true)));
        let app = app.clone();
        tasks.spawn(async move {
            // It never returns an error.
            let _never = axum::serve(listener, app).await;
        });
        Ok(address)
    });
    let addresses = addresses.collect::<Result<_, Failure>>()?;
    Ok((addresses, tasks))
}

/// Notes when hyper drops a response, before the set-up inside hears of it.
pub fn witnessed(server: Server<Body>, ledger: &Ledger) -> Server<Body> {
    let ledger = ledger.clone();
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        let ledger = ledger.clone();
        let call = number(&request);
        let response = server.clone().oneshot(request);
        async move {
            let response = response.await?;
            let witness = call.map(|call| Witness { ledger, call });
            let body = |inner| Body::new(Witnessed { witness, inner });
            Ok::<Response<Body>, Infallible>(response.map(body))
        }
    }))
}

fn number<A>(request: &Request<A>) -> Option<usize> {
    request.headers().get(CALL)?.to_str().ok()?.parse().ok()
}

struct Witness {
    ledger: Ledger,
    call: usize,
}

pin_project! {
    /// The witness is dropped first.
    struct Witnessed {
        witness: Option<Witness>,
        #[pin]
        inner: Body,
    }
}

// === impl Witness ===

impl Drop for Witness {
    fn drop(&mut self) {
        let life: &Life = self.ledger.life(self.call);
        self.ledger.stamp(&life.dropped);
    }
}

// === impl Witnessed ===

impl http_body::Body for Witnessed {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        self.project().inner.poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
