//! The safety limit of everything a test awaits.

use std::{fmt, pin::pin, time::Duration};

/// How long, in real time, a test waits for something that never comes.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Awaits `future`, or panics with `what` once [`LIMIT`] has passed.
///
/// `what` is formatted only then, so that it can show the state at that moment.
///
/// The limit counts real time. A paused clock jumps to the next timer whenever the runtime is idle,
/// and this timer would otherwise end a test that waits for a longer one, such as a grace of 20 s.
#[allow(
    clippy::disallowed_types,
    reason = "the limit must not follow the paused clock of a test"
)]
pub async fn within<F: Future>(what: impl fmt::Display, future: F) -> F::Output {
    let begun = std::time::Instant::now();
    let mut future = pin!(future);
    loop {
        match tokio::time::timeout(LIMIT, future.as_mut()).await {
            Ok(output) => return output,
            Err(_) if begun.elapsed() < LIMIT => {}
            Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
        }
    }
}
