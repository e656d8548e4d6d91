//! A helper for waiting until a condition holds.

use std::pin::pin;

use tokio::sync::Notify;

/// Waits until a condition holds, checking it at once and whenever `changed` is notified.
pub(crate) async fn wait_until(changed: &Notify, condition: impl Fn() -> bool) {
    loop {
        let mut notified = pin!(changed.notified());
        // Register before checking the condition, so that no change in between can be missed.
        notified.as_mut().enable();
        if condition() {
            return;
        }
        notified.await;
    }
}
