//! A future that is spawned if dropped before completion.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// A future that must run to completion. If it is dropped early, a closure spawns it.
///
/// The future is boxed because `Drop` has to move it, and it might not be `Unpin`.
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
    fn a_dropped_future_continues_where_it_left_off() {
        let steps = Cell::new(0);
        let step = || steps.set(steps.get() + 1);
        let mut spawned_on_drop = None;
        let work = async {
            step();
            yield_now().await;
            step();
        };
        let mut spawned = SpawnOnDrop::new(work, |work| spawned_on_drop = Some(work));
        assert_eq!((&mut spawned).now_or_never(), None);
        assert_eq!(steps.get(), 1);
        drop(spawned);
        assert_eq!(spawned_on_drop.unwrap().now_or_never(), Some(()));
        assert_eq!(steps.get(), 2);
    }

    #[test]
    fn a_completed_future_is_not_spawned() {
        let mut spawned_on_drop = false;
        let spawned = SpawnOnDrop::new(async { 7 }, |_| spawned_on_drop = true);
        assert_eq!(spawned.now_or_never(), Some(7));
        assert!(!spawned_on_drop);
    }
}
