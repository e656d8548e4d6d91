//! Logs hints about a setup that is incomplete or may behave unexpectedly.
//!
//! Each hint mentions the option or component that would change the behaviour. It is emitted at most once per layer, or once per session
//! manager for calls without a layer.

use std::sync::atomic::{AtomicU8, Ordering};

use tracing::{info, warn};

use crate::catch_panic::catch_panic;

/// A property of the setup that is worth a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    /// A policy sets `supersede`, but repeated calls are not detected without a session manager.
    SupersedeHasNoEffect,
    /// The calls' events are stored, so detached calls keep running.
    StoredCallsKeepRunning,
    /// A call is waiting for its disconnected client to resume.
    WaitingForResume,
    /// The layer is nested inside another layer.
    Nested,
    /// The session manager has received a call that did not pass through a layer.
    NoLayer,
    /// The session manager belongs to another layer, so it does not track this layer's calls.
    TwoLayers,
    /// The event ids look like rmcp's, but no session manager is tracking their calls.
    NoSessionManager,
}

/// The hints emitted so far, with one bit per [`Hint`].
#[derive(Debug, Default)]
pub(crate) struct SetupHints(AtomicU8);

// === impl SetupHints ===

impl SetupHints {
    /// Emits a hint, unless it has already been emitted.
    pub(crate) fn emit(&self, hint: Hint) {
        if !self.was_emitted(hint)
            && self.0.fetch_or(hint.bit(), Ordering::Relaxed) & hint.bit() == 0
        {
            catch_panic(|| hint.log());
        }
    }

    /// Returns `true` if `hint` has already been emitted.
    pub(crate) fn was_emitted(&self, hint: Hint) -> bool {
        self.0.load(Ordering::Relaxed) & hint.bit() != 0
    }
}

// === impl Hint ===

macro_rules! log_hint {
    ($level:ident, $message:literal) => {
        $level!(target: "mcp_cancel_on_disconnect::setup", $message)
    };
}

impl Hint {
    fn bit(self) -> u8 {
        1 << self as u8
    }

    fn log(self) {
        match self {
            Self::SupersedeHasNoEffect => log_hint!(
                warn,
                "Policy::supersede has no effect without a CancellableSessionManager: pass one to StreamableHttpService"
            ),
            Self::StoredCallsKeepRunning => log_hint!(
                info,
                "an event store is in use, so calls keep running after their clients disconnect, in case they are resumed \
                 on another server: set a grace period to cancel them"
            ),
            Self::WaitingForResume => log_hint!(
                info,
                "a client disconnected, and its call is waiting for it to resume: the call is cancelled once its grace \
                 period expires (at least 20 s by default); use CancelOnDisconnectLayer::grace to change that, or \
                 Grace::Immediate to cancel at once"
            ),
            Self::Nested => log_hint!(
                warn,
                "a request passed through two CancelOnDisconnectLayers: the inner one's options have no effect; \
                 set them on the outer one, and remove the inner one"
            ),
            Self::NoLayer => log_hint!(
                warn,
                "a call reached CancellableSessionManager without passing through a CancelOnDisconnectLayer: its client's \
                 disconnect will go undetected; add .layer(CancelOnDisconnectLayer::new()) to the router, and make sure \
                 that nothing strips the request's extensions"
            ),
            Self::TwoLayers => log_hint!(
                warn,
                "a CancellableSessionManager is receiving calls from two CancelOnDisconnectLayers: the second layer's calls \
                 are tracked as if there were no session manager; use clones of a single layer on all routes"
            ),
            Self::NoSessionManager => log_hint!(
                warn,
                "event ids look like rmcp's, but no CancellableSessionManager is tracking their calls: answers \
                 sent while a client is disconnected are lost; if rmcp runs in this process, pass \
                 Arc::new(CancellableSessionManager::default()) to StreamableHttpService; if the layer is in front of \
                 another process, ignore this warning"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_recorded_independently() {
        let hints = SetupHints::default();
        assert!(!hints.was_emitted(Hint::Nested));
        hints.emit(Hint::Nested);
        assert!(hints.was_emitted(Hint::Nested));
        assert!(!hints.was_emitted(Hint::StoredCallsKeepRunning));
        hints.emit(Hint::StoredCallsKeepRunning);
        assert!(hints.was_emitted(Hint::Nested));
    }
}
