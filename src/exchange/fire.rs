//! Fires an exchange's token and spawns its clean-ups.

use tokio_util::sync::CancellationToken;

use super::{
    signal::{CleanUpTask, Hook},
    state::{Exchange, Phase},
};
use crate::{
    call::{CancelReason, RequestId},
    policy::Grace,
    timer::Migration,
};

// === impl Exchange ===

impl Exchange {
    pub(super) fn fire(&self, reason: CancelReason) {
        self.signal.fire(reason, |task| self.spawn(task));
    }

    /// Adds a clean-up to run when the token fires.
    pub(crate) fn on_cancel<F>(&self, clean_up: impl FnOnce(CancelReason) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.add_hook(Hook::clean_up(clean_up));
    }

    /// Links `token`, so that it fires with the exchange's own token.
    pub(crate) fn link(&self, token: CancellationToken) {
        self.add_hook(Hook::Fire(token));
    }

    /// Returns the token if the call must keep running although its client's disconnect has dropped its stream.
    ///
    /// This only applies to calls without a session, because session calls are not tied to a stream. Returns `None` if the stream ended in
    /// any other way, or if something else has cancelled the call.
    pub(crate) fn outlives_stream(&self, request: &RequestId) -> Option<CancellationToken> {
        let call = self.call_with_request_id(request)?;
        let must_run = call.session().is_none() && call.policy().grace == Grace::Never;
        // The guard records the disconnect before it drops the stream.
        let is_disconnected = self.state().phase == Phase::Dropped;
        let outlives = must_run && is_disconnected && self.signal.reason().is_none();
        outlives.then(|| self.signal.token())
    }

    fn add_hook(&self, hook: Hook) {
        self.signal.add(hook, |task| self.spawn(task));
    }

    /// Spawns a clean-up. Once started, it may depend on its runtime, so it ends when that runtime shuts down.
    fn spawn(&self, clean_up: CleanUpTask) {
        let registry = &self.shared.registry;
        registry.timer().spawn(Migration::BeforeStart, clean_up);
    }
}
