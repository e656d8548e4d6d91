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
const KNOWN: usize = 16;

/// Changes whenever a runtime leaves. No two timers ever have the same number.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static HERE: [Cell<Here>; KNOWN] = const { [const { Cell::new(Here::NOTHING) }; KNOWN] };
}

#[derive(Debug)]
pub(super) struct Roll {
    number: AtomicU64,
    place: usize,
}

/// What a thread knows of one timer.
#[derive(Debug, Clone, Copy)]
struct Here {
    /// The number of the roll when it was found out.
    number: u64,
    /// The runtime, where the thread may come to drive another one.
    only: Option<Id>,
}

// === impl Roll ===

impl Roll {
    /// Whether the current runtime is known to keep time.
    pub(super) fn is_here(&self) -> bool {
        let number = self.number.load(Ordering::Relaxed);
        let here = HERE.with(|known| known.get(self.place).map(Cell::get));
        here.is_some_and(|here| here.number == number && here.is_current())
    }

    /// Notes for this thread that its runtime keeps time, or is about to. Under the timer's lock.
    pub(super) fn note(&self, runtime: &Handle) {
        let is_driven_by_others = runtime.runtime_flavor() == RuntimeFlavor::MultiThread;
        let here = Here {
            number: self.number.load(Ordering::Relaxed),
            only: (!is_driven_by_others).then(|| runtime.id()),
        };
        HERE.with(|known| {
            if let Some(known) = known.get(self.place) {
                known.set(here);
            }
        });
    }

    /// Makes all threads forget what they know: a keeper has ended. Under the timer's lock.
    pub(super) fn renew(&self) {
        self.number.store(next_number(), Ordering::Relaxed);
    }
}

impl Default for Roll {
    fn default() -> Self {
        let number = next_number();
        Self {
            number: AtomicU64::new(number),
            place: usize::try_from(number).map_or(0, |number| number % KNOWN),
        }
    }
}

// === impl Here ===

impl Here {
    const NOTHING: Self = Self {
        number: 0,
        only: None,
    };

    fn is_current(&self) -> bool {
        let is_current = |only| Handle::try_current().is_ok_and(|current| current.id() == only);
        self.only.is_none_or(is_current)
    }
}

fn next_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) + 1
}
