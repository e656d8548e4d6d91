//! Reports when an exchange is over, for tests that expect the layer to do nothing.
//!
//! It is a middleware *outside* the layer that drops whatever the layer has returned before it records the end. By
//! then, everything that the layer does in `Drop` has happened.

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::Request,
    middleware::{Next, from_fn},
};
use http_body::{Frame, SizeHint};
use tokio::sync::watch;

use crate::support::within;

/// The header in which a test names an exchange. Exchanges without it are not watched.
pub(crate) const EXCHANGE: &str = "x-exchange";

/// The log of named exchanges, which all clones share.
///
/// An exchange whose client disconnects very early is not in it, because hyper drops the request before any service
/// sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exchanges(Arc<watch::Sender<Log>>);

#[derive(Debug, Default)]
struct Log {
    started: BTreeSet<String>,
    /// Exchanges that have completed or that the client has abandoned.
    over: BTreeSet<String>,
}

/// Records the end of an exchange on drop, once everything inside it has been dropped.
struct EndRecorder {
    exchanges: Exchanges,
    name: String,
}

/// A body that calls `on_poll` whenever it is polled, and is dropped before `on_poll`.
pub(crate) struct PolledBody<F> {
    pub(crate) body: Body,
    pub(crate) on_poll: F,
}

// === impl Exchanges ===

impl Exchanges {
    /// Adds the middleware around everything in `router`.
    pub(crate) fn watch(&self, router: Router) -> Router {
        let exchanges = self.clone();
        router.layer(from_fn(move |request: Request, next: Next| {
            let recorder = exchanges.begin(&request);
            async move {
                // This is declared before the call, so it is dropped after it.
                let recorder = recorder;
                let response = next.run(request).await;
                match recorder {
                    Some(recorder) => response.map(|body| {
                        let on_poll = move || {
                            let _lives = &recorder;
                        };
                        Body::new(PolledBody { body, on_poll })
                    }),
                    None => response,
                }
            }
        }))
    }

    /// Waits until the exchange has started.
    pub(crate) async fn started_for(&self, name: &str) {
        let what = format!("exchange {name:?} to start");
        self.until(&what, |log| log.started.contains(name)).await;
    }

    /// Waits until the exchange is over.
    pub(crate) async fn over_for(&self, name: &str) {
        let what = format!("exchange {name:?} to be over");
        self.until(&what, |log| log.over.contains(name)).await;
    }

    /// Waits until every exchange that has started is over.
    pub(crate) async fn all_over(&self) {
        self.until("all exchanges to be over", |log| log.started == log.over)
            .await;
    }

    async fn until(&self, what: &str, reached: impl Fn(&Log) -> bool) {
        let mut log = self.0.subscribe();
        within(what, log.wait_for(reached))
            .await
            .expect("the sender is alive");
    }

    /// Records that an exchange has started. Returns `None` if the exchange has no name.
    fn begin(&self, request: &Request) -> Option<EndRecorder> {
        let name = request.headers().get(EXCHANGE)?.to_str().ok()?.to_owned();
        self.0.send_modify(|log| {
            log.started.insert(name.clone());
        });
        Some(EndRecorder {
            exchanges: self.clone(),
            name,
        })
    }
}

// === impl EndRecorder ===

impl Drop for EndRecorder {
    fn drop(&mut self) {
        let name = std::mem::take(&mut self.name);
        self.exchanges.0.send_modify(|log| {
            log.over.insert(name);
        });
    }
}

// === impl PolledBody ===

impl<F: FnMut() + Unpin> HttpBody for PolledBody<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        (self.on_poll)();
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
