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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt;
    use tokio::task::yield_now;

    use super::*;

    #[test]
    fn what_is_dropped_half_way_goes_on_from_there() {
        let steps = Cell::new(0);
        let step = || steps.set(steps.get() + 1);
        let mut handed_on = None;
        let work = async {
            step();
            yield_now().await;
            step();
        };
        let mut going_on = GoingOn::new(work, |work| handed_on = Some(work));
        assert_eq!((&mut going_on).now_or_never(), None);
        assert_eq!(steps.get(), 1);
        drop(going_on);
        assert_eq!(handed_on.unwrap().now_or_never(), Some(()));
        assert_eq!(steps.get(), 2);
    }

    #[test]
    fn what_has_ended_does_not_go_on() {
        let mut handed_on = false;
        let going_on = GoingOn::new(async { 7 }, |_| handed_on = true);
        assert_eq!(going_on.now_or_never(), Some(7));
        assert!(!handed_on);
    }
}
