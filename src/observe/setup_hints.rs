//! Remarks on what may surprise the author of a set-up. Each names the option or the part that changes it.
//!
//! A remark is made once for each layer, or for each session manager that has no layer.

use std::sync::atomic::{AtomicU8, Ordering};

use tracing::{info, warn};

/// Something to know about the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    /// A policy supersedes, and no session manager knows which calls are the same.
    SupersedeHasNoEffect,
    /// The events of calls are stored, so detached calls run on.
    StoredCallsRunOn,
    /// A call waits for a client that went away.
    CallsWait,
    /// The layer stands inside another one.
    Nested,
    /// Our session manager takes calls that passed no layer.
    NoLayer,
    /// Our session manager has calls of another layer already, so it leaves those of this one alone.
    TwoLayers,
    /// The sessions look like those of rmcp, and our session manager is not in use.
    NoSessionManager,
}

/// Which remarks were made.
#[derive(Debug, Default)]
pub(crate) struct SetupHints(AtomicU8);

// === impl SetupHints ===

impl SetupHints {
    /// Makes a remark, unless it was made before.
    pub(crate) fn emit(&self, remark: Hint) {
        if !self.was_emitted(remark)
            && self.0.fetch_or(remark.bit(), Ordering::Relaxed) & remark.bit() == 0
        {
            remark.log();
        }
    }

    /// Whether a remark was made.
    pub(crate) fn was_emitted(&self, remark: Hint) -> bool {
        self.0.load(Ordering::Relaxed) & remark.bit() != 0
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
            Self::StoredCallsRunOn => log_hint!(
                info,
                "events are in a store: calls whose clients go away run on, because they may be resumed \
                 on another server; set a grace to cancel them"
            ),
            Self::CallsWait => log_hint!(
                info,
                "a client went away, and its call waits for it to come back: after the grace (20 s or more by \
                 default) the call is cancelled; CancelOnDisconnectLayer::grace sets another grace, and \
                 Grace::Immediate sets none"
            ),
            Self::Nested => log_hint!(
                warn,
                "a request passed two CancelOnDisconnectLayers: the options of the inner one have no effect; \
                 set them on the outer one, and remove the inner one"
            ),
            Self::NoLayer => log_hint!(
                warn,
                "a call reached CancellableSessionManager without CancelOnDisconnectLayer: nobody sees its client \
                 hang up; add .layer(CancelOnDisconnectLayer::new()) to the router, and let requests keep their \
                 extensions on the way"
            ),
            Self::TwoLayers => log_hint!(
                warn,
                "a CancellableSessionManager has the calls of two CancelOnDisconnectLayers: those of the second are \
                 watched as if it had no session manager; put .layer(layer.clone()) of one layer on all routes"
            ),
            Self::NoSessionManager => log_hint!(
                warn,
                "event ids look like rmcp's, and no CancellableSessionManager binds their calls: answers that come \
                 while a client is away are lost. If rmcp runs in this process, give StreamableHttpService an \
                 Arc::new(CancellableSessionManager::default()); if the layer stands before \
                 another process, all is as it should be"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remark_is_made_once() {
        let remarks = SetupHints::default();
        assert!(!remarks.was_emitted(Hint::Nested));
        remarks.emit(Hint::Nested);
        assert!(remarks.was_emitted(Hint::Nested));
        assert!(!remarks.was_emitted(Hint::StoredCallsRunOn));
        remarks.emit(Hint::StoredCallsRunOn);
        assert!(remarks.was_emitted(Hint::Nested));
    }
}
