//! A timeout that migrates to another runtime along with its task.

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

/// Awaits `future` for at most `limit`. Returns `None` on timeout.
///
/// tokio's own timeout panics if it is polled after its runtime has ended.
pub(crate) async fn migrating_timeout<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let end = Instant::now().checked_add(limit);
    let mut future = pin!(future);
    let mut sleep: Option<(Id, Pin<Box<Sleep>>)> = None;
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        let (Some(end), Ok(current)) = (end, Handle::try_current()) else {
            // There is nothing to time out, or no runtime to sleep on.
            return Poll::Pending;
        };
        // If the task has moved to another runtime, start a new sleep there.
        let sleep = match &mut sleep {
            Some((runtime, sleep)) if *runtime == current.id() => sleep,
            sleep => &mut sleep.insert((current.id(), Box::pin(sleep_until(end)))).1,
        };
        sleep.as_mut().poll(cx).map(|()| None)
    })
    .await
}
