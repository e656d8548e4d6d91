//! A middleware that holds requests or responses until the test lets them through.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
};
use tokio::sync::{Notify, mpsc};

use super::EXCHANGE;
use crate::support::{Connection, Mcp, within};

/// What a [`Gate`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Request,
    /// A request, once its body has been read.
    ReadRequest,
    Response,
}

/// The gate, as the test sees it.
#[derive(Debug)]
pub(crate) struct Gate {
    opened: Arc<Notify>,
    entered: mpsc::UnboundedReceiver<()>,
}

// === impl Gate ===

impl Gate {
    /// Holds every request that `is_held` accepts, or its response. Also returns the middleware.
    pub(crate) fn new(
        held: Held,
        is_held: impl Fn(&Request) -> bool + Clone + Send + Sync + 'static,
    ) -> (Self, impl FnOnce(Router) -> Router + 'static) {
        let opened = Arc::new(Notify::new());
        let (enter, entered) = mpsc::unbounded_channel();
        let gate = opened.clone();
        let middleware = move |router: Router| {
            router.layer(from_fn(move |request: Request, next: Next| {
                let (gate, enter) = (gate.clone(), enter.clone());
                let is_held = is_held(&request);
                let wait = async move {
                    // The test might have dropped its side.
                    let _ = enter.send(());
                    gate.notified().await;
                };
                async move {
                    if !is_held {
                        return next.run(request).await;
                    }
                    match held {
                        Held::Request => {
                            wait.await;
                            next.run(request).await
                        }
                        Held::ReadRequest => {
                            let (head, body) = request.into_parts();
                            let body = to_bytes(body, usize::MAX).await.expect("a whole request");
                            wait.await;
                            next.run(Request::from_parts(head, Body::from(body))).await
                        }
                        Held::Response => {
                            let response = next.run(request).await;
                            wait.await;
                            response
                        }
                    }
                }
            }))
        };
        (Self { opened, entered }, middleware)
    }

    /// Holds the exchange with this name.
    pub(crate) fn for_exchange(
        held: Held,
        name: &'static str,
    ) -> (Self, impl FnOnce(Router) -> Router + 'static) {
        Self::new(held, move |request| {
            let exchange = request.headers().get(EXCHANGE);
            exchange.is_some_and(|exchange| exchange == name)
        })
    }

    /// Waits until the gate is holding another request or response.
    pub(crate) async fn entered(&mut self) {
        within(
            "the gate to hold a request or response",
            self.entered.recv(),
        )
        .await;
    }

    /// Sends a resume and waits until the gate is holding it.
    pub(crate) async fn resume(&mut self, mcp: &Mcp, event: &str) -> Connection {
        let resumed = mcp.resume(event).await;
        self.entered().await;
        resumed
    }

    /// Lets one held request or response through, or the next one if none is being held.
    pub(crate) fn open(&self) {
        self.opened.notify_one();
    }
}
