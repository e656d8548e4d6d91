//! Logs hints about a setup that is incomplete or may behave unexpectedly.
//!
//! Each hint names the option or component that would change the behaviour. It is emitted at most once per layer, or once per session
//! manager for calls without a layer.

use std::sync::atomic::{AtomicU8, Ordering};

use tracing::{info, warn};

use crate::catch_panic::catch_panic;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    /// A policy sets `supersede`, but repeated calls are not detected without a session manager.
    SupersedeHasNoEffect,
    /// The calls' events are stored, so detached calls keep running.
    StoredCallsKeepRunning,
    /// A call is waiting for a client that has disconnected.
    CallsWait,
    /// The layer is inside another one.
    Nested,
    /// The session manager has received a call that did not pass through a layer.
    NoLayer,
    /// The session manager belongs to another layer, so it does not bind this layer's calls.
    TwoLayers,
    /// The event ids look like rmcp's, but no session manager binds their calls.
    NoSessionManager,
}

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

    /// Returns `true` if a hint has been emitted.
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
                "Policy::supersede has no effect without CancellableSessionManager: give one to StreamableHttpService"
            ),
            Self::StoredCallsKeepRunning => log_hint!(
                info,
                "events are in a store: calls whose clients disconnect keep running, because they may be resumed \
                 on another server; set a grace to cancel them"
            ),
            Self::CallsWait => log_hint!(
                info,
                "a client disconnected, and its call waits for a resume: once the grace has passed (20 s or more by \
                 default), the call is cancelled; use CancelOnDisconnectLayer::grace to set another grace, or \
                 Grace::Immediate for none"
            ),
            Self::Nested => log_hint!(
                warn,
                "a request passed two CancelOnDisconnectLayers: the inner one's options have no effect; \
                 set them on the outer one, and remove the inner one"
            ),
            Self::NoLayer => log_hint!(
                warn,
                "a call reached CancellableSessionManager without CancelOnDisconnectLayer: its client's disconnect \
                 will not be detected; add .layer(CancelOnDisconnectLayer::new()) to the router, and let requests keep \
                 their extensions"
            ),
            Self::TwoLayers => log_hint!(
                warn,
                "a CancellableSessionManager has the calls of two CancelOnDisconnectLayers: the second layer's calls are \
                 tracked as if it had no session manager; put .layer(layer.clone()) of one layer on all routes"
            ),
            Self::NoSessionManager => log_hint!(
                warn,
                "event ids look like rmcp's, and no CancellableSessionManager binds their calls: answers \
                 sent while a client is disconnected are lost. If rmcp runs in this process, give StreamableHttpService an \
                 Arc::new(CancellableSessionManager::default()); if the layer is in front of \
                 another process, nothing is wrong"
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
