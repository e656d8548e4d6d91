//! A layer that wastes time, to see whether the gate notices.

use std::{
    hint::black_box,
    task::{Context, Poll},
};

use tower_layer::Layer;
use tower_service::Service;

/// Rounds of a loop of four instructions: together about 3 % of a bare call of 100 B.
const ROUNDS: u32 = 1_100;

#[derive(Debug, Clone, Copy)]
pub struct SlowLayer;

#[derive(Debug, Clone)]
pub struct Slow<S> {
    inner: S,
}

impl<S> Layer<S> for SlowLayer {
    type Service = Slow<S>;

    fn layer(&self, inner: S) -> Slow<S> {
        Slow { inner }
    }
}

impl<S: Service<R>, R> Service<R> for Slow<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: R) -> S::Future {
        for round in 0..ROUNDS {
            black_box(round);
        }
        self.inner.call(request)
    }
}
