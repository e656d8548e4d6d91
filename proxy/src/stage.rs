//! Stages: the services of which the proxy is made, and what they have in common.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    BoxError,
    body::{Body, Bytes, HttpBody},
};
use futures_util::{TryFutureExt as _, future::MapOk};
use http::{Request, Response};
use mcp_cancel_on_disconnect::body::TeeBody;
use tower_service::Service;

/// A service that answers every request, with a body of one kind.
pub trait Stage:
    Service<
        Request<Body>,
        Response = Response<Body>,
        Error = Infallible,
        Future: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
    > + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> Stage for S where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
        > + Clone
        + Send
        + Sync
        + 'static
{
}

/// What a stage answers, and when.
pub type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

// === Around the layer ===

/// A stage inside the layer, which changes the type of the request's body.
#[derive(Debug, Clone)]
pub struct Inside<S>(pub S);

impl<S: Stage> Service<Request<TeeBody<Body>>> for Inside<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<TeeBody<Body>>) -> S::Future {
        self.0.call(request.map(Body::new))
    }
}

/// A service as a stage, whatever body it answers with.
#[derive(Debug, Clone)]
pub struct Outside<S>(pub S);

impl<S, B> Service<Request<Body>> for Outside<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = MapOk<S::Future, fn(Response<B>) -> Response<Body>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0
            .call(request)
            .map_ok(|response| response.map(Body::new))
    }
}
