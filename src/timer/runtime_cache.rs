//! A thread-local cache of the runtimes that already have a timer task.
//!
//! Every request reads the cache, so a hit must be cheap: it costs one relaxed load and one read of a thread-local.
//!
//! - A worker thread of a multi-threaded runtime stays with that runtime, so its entry is valid until a timer task ends.
//! - A thread that drives a runtime on its own may drive another one later, so its entry stores the runtime's id, and each hit compares
//!   that with the current handle's id. tokio clones the handle for this, but without contention, because no other thread drives the
//!   runtime.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::runtime::{Handle, Id, RuntimeFlavor};

/// Maximum number of timers cached per thread. A server usually has two: its layer's and its session manager's.
const CACHED_TIMERS: usize = 16;

/// The last epoch issued. A timer gets a new epoch whenever one of its tasks ends, and no two timers ever share one.
static LAST_EPOCH: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CURRENT_RUNTIMES: [Cell<CurrentRuntime>; CACHED_TIMERS] = const { [const { Cell::new(CurrentRuntime::UNKNOWN) }; CACHED_TIMERS] };
}

#[derive(Debug)]
pub(super) struct RuntimeCache {
    epoch: AtomicU64,
    slot: usize,
}

/// A thread's cache entry for one timer.
#[derive(Debug, Clone, Copy)]
struct CurrentRuntime {
    /// The timer's epoch when the entry was recorded.
    epoch: u64,
    /// The only runtime the entry applies to.
    ///
    /// `None` on a worker thread, which never drives another runtime.
    pinned_to: Option<Id>,
}

// === impl RuntimeCache ===

impl RuntimeCache {
    /// Returns `true` if the current runtime is known to have a timer task.
    pub(super) fn is_registered(&self) -> bool {
        let epoch = self.epoch.load(Ordering::Relaxed);
        let current = CURRENT_RUNTIMES.with(|cached| cached.get(self.slot).map(Cell::get));
        current.is_some_and(|current| current.epoch == epoch && current.is_current())
    }

    /// Records that this thread's runtime has a timer task or is about to spawn one. The caller must hold the timer's lock.
    pub(super) fn record(&self, runtime: &Handle) {
        let is_multi_threaded = runtime.runtime_flavor() == RuntimeFlavor::MultiThread;
        let current = CurrentRuntime {
            epoch: self.epoch.load(Ordering::Relaxed),
            pinned_to: (!is_multi_threaded).then(|| runtime.id()),
        };
        CURRENT_RUNTIMES.with(|cached| {
            if let Some(cached) = cached.get(self.slot) {
                cached.set(current);
            }
        });
    }

    /// Invalidates all threads' entries, because a timer task has ended. The caller must hold the timer's lock.
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
