//! The timeout for everything that a test waits for.

use std::{fmt, pin::pin, time::Duration};

/// The longest real time for which a test waits.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Awaits `future`, or panics with `what` after [`LIMIT`].
///
/// `what` is only formatted at that point, so it can show the state at the time of the failure.
///
/// The limit is in real time, because a paused clock jumps to the next timer whenever the runtime is idle. If it were
/// on tokio's clock, a test that waits for a longer timer, such as a grace period of 20 s, would fail.
#[allow(
    clippy::disallowed_types,
    reason = "the limit must not follow a test's paused clock"
)]
pub async fn within<F: Future>(what: impl fmt::Display, future: F) -> F::Output {
    let started = std::time::Instant::now();
    let mut future = pin!(future);
    loop {
        match tokio::time::timeout(LIMIT, future.as_mut()).await {
            Ok(output) => return output,
            Err(_) if started.elapsed() < LIMIT => {}
            Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
        }
    }
}
