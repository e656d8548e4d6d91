//! Asks the application whether an orphan may be cancelled.

use std::{pin::Pin, time::Duration};

use crate::call::{CallInfo, Detachment};

/// A call whose client has not resumed within its grace period, as passed to [`confirm`].
///
/// [`confirm`]: crate::CancelOnDisconnectLayer::confirm
///
/// ```
/// use std::future::ready;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Confirmation, Orphan};
///
/// /// Gives reports a second grace period.
/// fn decide(orphan: &Orphan<'_>) -> Confirmation {
///     let grace = orphan.grace();
///     match orphan.call().tool() {
///         Some("report") if orphan.detachment().lasted() < 2 * grace => Confirmation::Postpone(grace),
///         _ => Confirmation::Cancel,
///     }
/// }
///
/// let layer = CancelOnDisconnectLayer::new().confirm(|orphan| ready(decide(orphan)));
/// assert!(layer.calls().is_empty());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Orphan<'a> {
    pub(crate) call: &'a CallInfo,
    pub(crate) detachment: Detachment,
    pub(crate) grace: Duration,
}

/// What to do with an orphan, as decided by [`confirm`](crate::CancelOnDisconnectLayer::confirm).
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::Confirmation;
///
/// let later = Confirmation::Postpone(Duration::from_secs(20));
/// assert_ne!(later, Confirmation::Cancel);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Confirmation {
    /// No client will resume the call, so it may be cancelled.
    Cancel,
    /// Not yet. The call waits this much longer (at least 100 ms), and then `confirm` is called again.
    Postpone(Duration),
    /// Another instance owns the call's session, so the call may be cancelled.
    ///
    /// No client will resume it on this instance, so it is cancelled as [`SessionClosed`](crate::CancelReason::SessionClosed).
    SessionClosed,
}

pub(crate) type Confirm = dyn Fn(&Orphan<'_>) -> Confirming + Send + Sync;

pub(crate) type Confirming = Pin<Box<dyn Future<Output = Confirmation> + Send>>;

// === impl Orphan ===

impl<'a> Orphan<'a> {
    /// Returns the orphaned call.
    pub fn call(&self) -> &'a CallInfo {
        self.call
    }

    /// Returns the call's detachment, which is still ongoing.
    pub fn detachment(&self) -> Detachment {
        self.detachment
    }

    /// Returns the grace period chosen when the client disconnected. Postponing does not change it.
    pub fn grace(&self) -> Duration {
        self.grace
    }
}
