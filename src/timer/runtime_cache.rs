//! A thread-local cache of the runtimes that have a task of a timer.
//!
//! Every request reads the cache, so a hit must be cheap: one relaxed load and one read of a thread-local.
//!
//! - A worker thread of a multi-threaded runtime stays with that runtime. Its entry is valid until a timer task ends.
//! - A thread that drives a runtime on its own may drive another one later. So its entry has the id of the runtime, and each hit compares
//!   that id with the id of the current handle. There is no contention when tokio clones
//!   the handle for this, because no other thread drives the runtime.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::runtime::{Handle, Id, RuntimeFlavor};

/// Maximum number of timers that a thread caches: 16. A server usually has two: those of its layer and its session manager.
const CACHED_TIMERS: usize = 16;

/// The last epoch. A timer gets a new epoch whenever one of its tasks ends, and two timers never share one.
static LAST_EPOCH: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CURRENT_RUNTIMES: [Cell<CurrentRuntime>; CACHED_TIMERS] = const { [const { Cell::new(CurrentRuntime::UNKNOWN) }; CACHED_TIMERS] };
}

#[derive(Debug)]
pub(super) struct RuntimeCache {
    epoch: AtomicU64,
    slot: usize,
}

/// The cache entry of one timer in one thread.
#[derive(Debug, Clone, Copy)]
struct CurrentRuntime {
    /// Epoch of the timer when the entry was recorded.
    epoch: u64,
    /// The runtime. `None` for a worker thread, which never drives another one.
    pinned_to: Option<Id>,
}

// === impl RuntimeCache ===

impl RuntimeCache {
    /// Returns `true` if the current runtime is known to have a timer task.
    pub(super) fn is_registered(&self) -> bool {
        let epoch = self.epoch.load(Ordering::Relaxed);
        let here = CURRENT_RUNTIMES.with(|cached| cached.get(self.slot).map(Cell::get));
        here.is_some_and(|here| here.epoch == epoch && here.is_current())
    }

    /// Records for this thread that its runtime has a timer task, or is about to spawn one. Requires the timer's lock.
    pub(super) fn record(&self, runtime: &Handle) {
        let is_multi_threaded = runtime.runtime_flavor() == RuntimeFlavor::MultiThread;
        let here = CurrentRuntime {
            epoch: self.epoch.load(Ordering::Relaxed),
            pinned_to: (!is_multi_threaded).then(|| runtime.id()),
        };
        CURRENT_RUNTIMES.with(|cached| {
            if let Some(cached) = cached.get(self.slot) {
                cached.set(here);
            }
        });
    }

    /// Invalidates the entries of all threads, because a timer task has ended. Requires the timer's lock.
    pub(super) fn invalidate(&self) {
        self.epoch.store(next_epoch(), Ordering::Relaxed);
    }
}

impl Default for RuntimeCache {
    fn default() -> Self {
        let epoch = next_epoch();
        Self {
            epoch: AtomicU64::new(epoch),
            slot: usize::try_from(epoch).map_or(0, |epoch| epoch % CACHED_TIMERS),
        }
    }
}

// === impl CurrentRuntime ===

impl CurrentRuntime {
    const UNKNOWN: Self = Self {
        epoch: 0,
        pinned_to: None,
    };

    fn is_current(&self) -> bool {
        let is_current = |only| Handle::try_current().is_ok_and(|current| current.id() == only);
        self.pinned_to.is_none_or(is_current)
    }
}

fn next_epoch() -> u64 {
    LAST_EPOCH.fetch_add(1, Ordering::Relaxed) + 1
}
