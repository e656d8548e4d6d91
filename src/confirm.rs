//! The question whether an orphan may be cancelled, and the answers to it.

use std::{pin::Pin, time::Duration};

use crate::call::{CallInfo, Detachment};

/// A call whose client did not come back within its grace. See
/// [`confirm`](crate::CancelOnDisconnectLayer::confirm), which has an example.
#[derive(Debug, Clone, Copy)]
pub struct Orphan<'a> {
    call: &'a CallInfo,
    detachment: Detachment,
    grace: Duration,
}

/// Whether an orphan may be cancelled. See [`confirm`](crate::CancelOnDisconnectLayer::confirm), which has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Confirmation {
    /// It may: nobody will come for it.
    Cancel,
    /// Not yet. It waits for this much longer, at least 100 ms, and then the question comes again.
    PutOff(Duration),
    /// Its session lives elsewhere by now, so nobody will come for it here: it is cancelled as
    /// [`SessionClosed`](crate::CancelReason::SessionClosed).
    SessionClosed,
}

pub(crate) type Confirm = dyn Fn(&Orphan<'_>) -> Confirming + Send + Sync;

pub(crate) type Confirming = Pin<Box<dyn Future<Output = Confirmation> + Send>>;

// === impl Orphan ===

impl<'a> Orphan<'a> {
    pub(crate) fn new(call: &'a CallInfo, detachment: Detachment, grace: Duration) -> Self {
        Self {
            call,
            detachment,
            grace,
        }
    }

    /// The call.
    pub fn call(&self) -> &'a CallInfo {
        self.call
    }

    /// The time that it has had no client so far.
    pub fn detachment(&self) -> Detachment {
        self.detachment
    }

    /// How long it had to wait at first.
    pub fn grace(&self) -> Duration {
        self.grace
    }
}
