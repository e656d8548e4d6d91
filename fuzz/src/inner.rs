//! A closure as an inner service.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use http::{Request, Response};
use tower_service::Service;

/// Answers every request, and never fails.
#[derive(Clone)]
pub struct Inner<F>(pub F);

impl<F, Fut, B, RB> Service<Request<B>> for Inner<F>
where
    F: FnMut(Request<B>) -> Fut,
    Fut: Future<Output = Response<RB>> + Send + 'static,
{
    type Response = Response<RB>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<RB>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let answer = (self.0)(request);
        Box::pin(async move { Ok(answer.await) })
    }
}
