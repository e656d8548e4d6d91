//! All calls in flight behind one lock, and the handle that counts them.
//!
//! `core` decides and never waits, `driver` waits and never decides. The lock is held for a map operation,
//! never across an await or a callback.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::time::Instant;

use self::{core::Core, driver::Driver};
use crate::{
    call::{CallId, CancelReason},
    exchange::Exchange,
};

mod core;
mod driver;

pub(crate) use self::core::{Finished, Key, Scope, UNSEEN_FOR, Wait};

/// The calls in flight of a layer and all its clones.
///
/// ```
/// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
///
/// let layer = CancelOnDisconnectLayer::new();
/// assert_eq!(layer.calls().len(), 0);
/// ```
#[derive(Clone)]
pub struct Calls {
    registry: Arc<Registry>,
}

pub(crate) struct Registry {
    core: Mutex<Core<Arc<Exchange>>>,
    driver: Driver,
}

// === impl Calls ===

impl Calls {
    pub(crate) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }

    /// The number of calls that have not ended, attached or detached.
    pub fn len(&self) -> usize {
        self.registry.core().len()
    }

    /// Whether no call is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("len", &self.len()).finish()
    }
}

// === impl Registry ===

impl Registry {
    pub(crate) fn new() -> Self {
        Self {
            core: Mutex::new(Core::new()),
            driver: Driver::default(),
        }
    }

    /// Takes the current runtime for what has to wait. Called with every request.
    pub(crate) fn on_this_runtime(self: &Arc<Self>) {
        self.driver.start(|| {
            let weak: Weak<Self> = Arc::downgrade(self);
            weak
        });
    }

    pub(crate) fn start(&self, id: CallId, key: Option<Key>, call: Arc<Exchange>) {
        self.core().start(id, key, call);
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn start_accepted(&self, id: CallId, key: Key, call: Arc<Exchange>) {
        let mut core = self.core();
        core.start(id, Some(key), call);
        core.claim(id);
    }

    pub(crate) fn claim(&self, id: CallId) {
        self.core().claim(id);
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn rekey(&self, id: CallId, key: Key) {
        self.core().rekey(id, key);
    }

    /// `false` if the call is not in flight.
    pub(crate) fn detach(&self, id: CallId, wait: Wait) -> bool {
        let in_flight = self.core().detach(id, wait);
        if in_flight {
            self.driver.wake();
        }
        in_flight
    }

    pub(crate) fn spare(&self, scope: &Scope, session: &str) {
        self.core().spare(scope, session, Instant::now());
    }

    pub(crate) fn finish(&self, id: CallId) -> Option<Finished> {
        self.core().finish(id)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        self.driver.spawn(task)
    }

    fn core(&self) -> MutexGuard<'_, Core<Arc<Exchange>>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

impl driver::Expire for Registry {
    fn expire(self: Arc<Self>, now: Instant) -> Option<Instant> {
        let orphans = self.core().expire(now);
        for (id, exchange) in orphans {
            exchange.cancel(id, CancelReason::Orphaned);
        }
        self.core().next_deadline()
    }
}
