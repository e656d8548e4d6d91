//! What fires with the token of an exchange, and where clean-ups run.

#[cfg(feature = "rmcp")]
use tokio_util::sync::CancellationToken;

use super::{signal::Hook, state::Exchange};
use crate::{call::CancelReason, registry::Moves};

// === impl Exchange ===

impl Exchange {
    pub(super) fn fire(&self, reason: CancelReason) {
        // A clean-up that has begun may have to do with its runtime, and ends with that.
        let registry = &self.instance.registry;
        let spawn = |task| registry.spawn(Moves::BeforeItBegins, task);
        self.signal.fire(reason, spawn);
    }

    /// Has `clean_up` run when the token fires.
    pub(crate) fn on_cancel<F>(&self, clean_up: impl FnOnce(CancelReason) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.hook(Hook::clean_up(clean_up));
    }

    /// Has `token` fire with the exchange's own.
    #[cfg(feature = "rmcp")]
    pub(crate) fn link(&self, token: CancellationToken) {
        self.hook(Hook::Fire(token));
    }

    fn hook(&self, hook: Hook) {
        let registry = &self.instance.registry;
        let spawn = |task| registry.spawn(Moves::BeforeItBegins, task);
        self.signal.add(hook, spawn);
    }
}
