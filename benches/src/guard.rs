//! A hand-written drop guard, for comparison.
//!
//! The guard puts a token into the request. The token fires when the response is dropped before it has ended, or the
//! request before it has a response. The guard knows no ids and no sessions, so a client that resumes has lost its
//! call. The handler must also check this token itself, because rmcp's own never fires.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, Service, service_fn};

use crate::setup::{Server, boxed};

/// Fires when the client disconnects. Found in the request's extensions.
#[derive(Debug, Clone)]
pub struct ClientDisconnected(pub CancellationToken);

pin_project! {
    /// A body with a value that is dropped along with it, and before it.
    ///
    /// If the body ends first, the value is passed to a function instead.
    pub struct GuardedBody<B, T> {
        tie: Option<T>,
        // Called with `tie` when the body ends.
        ended: fn(T),
        #[pin]
        body: B,
    }
}

/// Wraps a service so that each request gets a [`ClientDisconnected`].
pub fn guarded<S, A, B>(mut service: S) -> Server<A>
where
    S: Service<Request<A>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    A: Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    boxed(service_fn(move |mut request: Request<A>| {
        let token = CancellationToken::new();
        request
            .extensions_mut()
            .insert(ClientDisconnected(token.clone()));
        let guard = token.drop_guard();
        service.call(request).map_ok(|response| {
            response.map(|body| GuardedBody::new(body, guard, |guard| drop(guard.disarm())))
        })
    }))
}

// === impl GuardedBody ===

impl<B, T> GuardedBody<B, T> {
    pub fn new(body: B, tie: T, ended: fn(T)) -> Self {
        let tie = Some(tie);
        Self { tie, ended, body }
    }
}

impl<B: Body<Data = Bytes>, T> Body for GuardedBody<B, T> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(context));
        if frame.is_none()
            && let Some(tie) = this.tie.take()
        {
            (this.ended)(tie);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
