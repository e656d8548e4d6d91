//! What one would write by hand instead: a token in the request that fires when the response is dropped.
//!
//! It knows neither ids nor sessions: a client that comes back for its answer has lost its call, and a handler must
//! look for the token itself, because rmcp's own never fires.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower_layer::Layer;
use tower_service::Service;

/// Fires when the client is gone. In the request's extensions.
#[derive(Debug, Clone)]
pub struct ClientGone(pub CancellationToken);

#[derive(Debug, Clone, Copy, Default)]
pub struct GuardLayer;

#[derive(Debug, Clone)]
pub struct Guarded<S> {
    inner: S,
}

pin_project! {
    pub struct GuardedFuture<F> {
        #[pin]
        inner: F,
        guard: Option<DropGuard>,
    }
}

pin_project! {
    pub struct GuardedBody<B> {
        #[pin]
        inner: B,
        guard: Option<DropGuard>,
    }
}

// === impl GuardLayer ===

impl<S> Layer<S> for GuardLayer {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner }
    }
}

// === impl Guarded ===

impl<S, A, B> Service<Request<A>> for Guarded<S>
where
    S: Service<Request<A>, Response = Response<B>>,
{
    type Response = Response<GuardedBody<B>>;
    type Error = S::Error;
    type Future = GuardedFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<A>) -> Self::Future {
        let token = CancellationToken::new();
        request.extensions_mut().insert(ClientGone(token.clone()));
        GuardedFuture {
            inner: self.inner.call(request),
            guard: Some(token.drop_guard()),
        }
    }
}

// === impl GuardedFuture ===

impl<F, B, E> Future for GuardedFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<GuardedBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = std::task::ready!(this.inner.poll(context));
        let guard = this.guard.take();
        Poll::Ready(response.map(|response| response.map(|inner| GuardedBody { inner, guard })))
    }
}

// === impl GuardedBody ===

impl<B: Body<Data = Bytes>> Body for GuardedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let frame = std::task::ready!(this.inner.poll_frame(context));
        if frame.is_none()
            && let Some(guard) = this.guard.take()
        {
            guard.disarm();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
