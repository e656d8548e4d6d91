//! The trait that the proxy's services implement and adapters for services around the layer.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    BoxError,
    body::{Body, Bytes, HttpBody},
};
use bytes::BytesMut;
use futures_util::{StreamExt as _, TryFutureExt as _, future::MapOk, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mcp_cancel_on_disconnect::body::TeeBody;
use tower_service::Service;

/// A service that responds to every request, always with the same type of body.
pub trait HttpService:
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

impl<S> HttpService for S where
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

/// The boxed response future of an [`HttpService`].
pub type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

// === Around the layer ===

/// An adapter that converts the layer's bodies to [`Body`] for a service inside the layer.
#[derive(Debug, Clone)]
pub struct InnerService<S>(pub S);

impl<S: HttpService> Service<Request<TeeBody<Body>>> for InnerService<S> {
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

/// An adapter that turns any infallible service into an [`HttpService`].
#[derive(Debug, Clone)]
pub struct OuterService<S>(pub S);

impl<S, B> Service<Request<Body>> for OuterService<S>
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

// === Bodies ===

/// Reads a body to the end, excluding its trailers.
///
/// # Errors
///
/// If the body is longer than `max` bytes or can't be read to the end, returns a body that yields the same frames.
pub(crate) async fn read_to_end(mut body: Body, max: usize) -> Result<Bytes, Body> {
    let mut frames: Vec<Result<Frame<Bytes>, axum::Error>> = Vec::new();
    let (mut length, mut is_data) = (0, true);
    while is_data && length <= max {
        let Some(frame) = body.frame().await else {
            return Ok(join(frames, length));
        };
        // Drop trailers, as the proxy also drops the hop-by-hop header that announces them.
        if frame.as_ref().is_ok_and(Frame::is_trailers) {
            continue;
        }
        let data = frame.as_ref().ok().and_then(|frame| frame.data_ref());
        (length, is_data) = (length + data.map_or(0, Bytes::len), data.is_some());
        frames.push(frame);
    }
    let rest = stream::unfold(body, async |mut body| Some((body.frame().await?, body)));
    let frames = stream::iter(frames).chain(rest);
    Err(Body::new(StreamBody::new(frames)))
}

/// Joins data frames with a total length of `length`, without copying if there is only one.
fn join(frames: Vec<Result<Frame<Bytes>, axum::Error>>, length: usize) -> Bytes {
    let mut pieces = frames
        .into_iter()
        .flatten()
        .filter_map(|frame| frame.into_data().ok());
    let first = pieces.next().unwrap_or_default();
    if first.len() == length {
        return first;
    }
    let mut body = BytesMut::with_capacity(length);
    body.extend_from_slice(&first);
    pieces.for_each(|piece| body.extend_from_slice(&piece));
    body.freeze()
}
