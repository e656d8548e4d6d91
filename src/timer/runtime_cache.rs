//! The runtimes on which a timer has a keeper, as far as each thread knows.
//!
//! Every request asks for it, so it costs one relaxed load and a look at what the thread knows. A thread of a multi-threaded
//! runtime stays with it, so what it found out once holds until a keeper ends. A thread that drives a runtime by itself may
//! drive another one next, so there the runtime's id is compared. That clones the runtime's handle, which no other thread does
//! at the same time.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::runtime::{Handle, Id, RuntimeFlavor};

/// How many timers a thread can know: 16. A server has two.
const CACHED_TIMERS: usize = 16;

/// Changes whenever a runtime leaves. No two timers ever have the same number.
static LAST_EPOCH: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CURRENT_RUNTIMES: [Cell<CurrentRuntime>; CACHED_TIMERS] = const { [const { Cell::new(CurrentRuntime::UNKNOWN) }; CACHED_TIMERS] };
}

#[derive(Debug)]
pub(super) struct RuntimeCache {
    epoch: AtomicU64,
    slot: usize,
}

/// What a thread knows of one timer.
#[derive(Debug, Clone, Copy)]
struct CurrentRuntime {
    /// The number of the roll when it was found out.
    epoch: u64,
    /// The runtime, where the thread may come to drive another one.
    pinned_to: Option<Id>,
}

// === impl Roll ===

impl RuntimeCache {
    /// Whether the current runtime is known to keep time.
    pub(super) fn is_registered(&self) -> bool {
        let number = self.epoch.load(Ordering::Relaxed);
        let here = CURRENT_RUNTIMES.with(|known| known.get(self.slot).map(Cell::get));
        here.is_some_and(|here| here.epoch == number && here.is_current())
    }

    /// Notes for this thread that its runtime keeps time, or is about to. Under the timer's lock.
    pub(super) fn record(&self, runtime: &Handle) {
        let is_driven_by_others = runtime.runtime_flavor() == RuntimeFlavor::MultiThread;
        let here = CurrentRuntime {
            epoch: self.epoch.load(Ordering::Relaxed),
            pinned_to: (!is_driven_by_others).then(|| runtime.id()),
        };
        CURRENT_RUNTIMES.with(|known| {
            if let Some(known) = known.get(self.slot) {
                known.set(here);
            }
        });
    }

    /// Makes all threads forget what they know: a keeper has ended. Under the timer's lock.
    pub(super) fn invalidate(&self) {
        self.epoch.store(next_epoch(), Ordering::Relaxed);
    }
}

impl Default for RuntimeCache {
    fn default() -> Self {
        let number = next_epoch();
        Self {
            epoch: AtomicU64::new(number),
            slot: usize::try_from(number).map_or(0, |number| number % CACHED_TIMERS),
        }
    }
}

// === impl Here ===

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
