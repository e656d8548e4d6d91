//! The timeout of every wait in a test.

use std::{fmt, pin::pin, time::Duration};

/// Maximum real time that a test waits.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Awaits `future`, or panics with `what` after [`LIMIT`].
///
/// `what` is formatted only then, so that it can show the state at that moment.
///
/// The limit is in real time, because a paused clock advances to the next timer whenever the runtime is idle. With a
/// limit on tokio's clock, a test that waits for a longer timer, such as a grace of 20 s, would fail.
#[allow(
    clippy::disallowed_types,
    reason = "the limit must not follow the paused clock of a test"
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
