//! Waiting for a condition.

use std::pin::pin;

use tokio::sync::Notify;

/// Waits until `condition` returns `true`. Checks it immediately, and again whenever `changed` is notified.
pub(crate) async fn wait_until(changed: &Notify, condition: impl Fn() -> bool) {
    loop {
        let mut notified = pin!(changed.notified());
        // Register before the check, so that no change can be missed in between.
        notified.as_mut().enable();
        if condition() {
            return;
        }
        notified.await;
    }
}
