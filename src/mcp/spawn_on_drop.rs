//! A future that is spawned when its request is dropped in the middle of it.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// A future that may not be given up half way. If it is dropped before its end, it is handed to a closure that spawns it.
///
/// It is in a box because a drop must be able to hand it on, and it may not be `Unpin`.
pub(super) struct SpawnOnDrop<F, S: FnOnce(Pin<Box<F>>)>(Option<(Pin<Box<F>>, S)>);

// === impl SpawnOnDrop ===

impl<F, S: FnOnce(Pin<Box<F>>)> SpawnOnDrop<F, S> {
    pub(super) fn new(future: F, spawn: S) -> Self {
        Self(Some((Box::pin(future), spawn)))
    }
}

impl<F: Future, S: FnOnce(Pin<Box<F>>) + Unpin> Future for SpawnOnDrop<F, S> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some((future, _)) = &mut self.0 else {
            return Poll::Pending;
        };
        let output = ready!(future.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(output)
    }
}

impl<F, S: FnOnce(Pin<Box<F>>)> Drop for SpawnOnDrop<F, S> {
    fn drop(&mut self) {
        if let Some((future, spawn)) = self.0.take() {
            spawn(future);
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
        let mut spawned = SpawnOnDrop::new(work, |work| handed_on = Some(work));
        assert_eq!((&mut spawned).now_or_never(), None);
        assert_eq!(steps.get(), 1);
        drop(spawned);
        assert_eq!(handed_on.unwrap().now_or_never(), Some(()));
        assert_eq!(steps.get(), 2);
    }

    #[test]
    fn what_has_ended_does_not_go_on() {
        let mut handed_on = false;
        let spawned = SpawnOnDrop::new(async { 7 }, |_| handed_on = true);
        assert_eq!(spawned.now_or_never(), Some(7));
        assert!(!handed_on);
    }
}
