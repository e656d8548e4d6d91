//! What goes on in a task when its request is dropped in the middle of it.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// A future that may not be given up half way: dropped before its end, it is handed to `go_on`.
pub(super) struct GoingOn<F, G: FnOnce(Pin<Box<F>>)> {
    // Boxed because a drop must be able to hand it on, and it may not be `Unpin`.
    future: Option<Pin<Box<F>>>,
    go_on: Option<G>,
}

// === impl GoingOn ===

impl<F, G: FnOnce(Pin<Box<F>>)> GoingOn<F, G> {
    pub(super) fn new(future: F, go_on: G) -> Self {
        Self {
            future: Some(Box::pin(future)),
            go_on: Some(go_on),
        }
    }
}

impl<F: Future, G: FnOnce(Pin<Box<F>>) + Unpin> Future for GoingOn<F, G> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(future) = &mut self.future else {
            return Poll::Pending;
        };
        let output = ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<F, G: FnOnce(Pin<Box<F>>)> Drop for GoingOn<F, G> {
    fn drop(&mut self) {
        if let (Some(future), Some(go_on)) = (self.future.take(), self.go_on.take()) {
            go_on(future);
        }
    }
}
