//! A time limit that moves along when its task moves to another runtime.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::Poll,
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep, sleep_until},
};

/// Waits for `future`, but not longer than `limit`. tokio's own time limit panics where it is polled after its runtime
/// has ended.
pub(crate) async fn migrating_timeout<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let end = Instant::now().checked_add(limit);
    let mut future = pin!(future);
    let mut alarm: Option<(Id, Pin<Box<Sleep>>)> = None;
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        let (Some(end), Ok(here)) = (end, Handle::try_current()) else {
            return Poll::Pending;
        };
        let alarm = match &mut alarm {
            Some((runtime, alarm)) if *runtime == here.id() => alarm,
            alarm => &mut alarm.insert((here.id(), Box::pin(sleep_until(end)))).1,
        };
        alarm.as_mut().poll(cx).map(|()| None)
    })
    .await
}
