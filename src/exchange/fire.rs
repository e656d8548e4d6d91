//! The firing of an exchange's token, and the tasks of clean-ups.

use tokio_util::sync::CancellationToken;

use super::{
    signal::{CleanUpTask, Hook},
    state::Exchange,
};
use crate::{call::CancelReason, timer::Migration};

// === impl Exchange ===

impl Exchange {
    pub(super) fn fire(&self, reason: CancelReason) {
        self.signal.fire(reason, |task| self.spawn(task));
    }

    /// Has `clean_up` run when the token fires.
    pub(crate) fn on_cancel<F>(&self, clean_up: impl FnOnce(CancelReason) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.hook(Hook::clean_up(clean_up));
    }

    /// Has `token` fire with the exchange's own.
    pub(crate) fn link(&self, token: CancellationToken) {
        self.hook(Hook::Fire(token));
    }

    fn hook(&self, hook: Hook) {
        self.signal.add(hook, |task| self.spawn(task));
    }

    /// Runs a clean-up. One that has begun may have to do with its runtime, and ends with that.
    fn spawn(&self, clean_up: CleanUpTask) {
        let registry = &self.shared.registry;
        registry.timer().spawn(Migration::BeforeStart, clean_up);
    }
}
