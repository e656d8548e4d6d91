//! The turns of resumes.
//!
//! The manager is asked for the resumes of a call one at a time, in the order in which they came: rmcp gives the call's
//! stream to the resume that it hears last, and ends the one before. If several wait for room in the queue of a session,
//! rmcp may hear them in any order, and the client of one may have gone by then.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{call::CallId, lock::lock, timer::migrating_timeout};

/// How long a resume waits for the one before it: 4 s. It holds its call's clock for 5 s past the deadline, and the manager
/// is to be asked within that time, or the call would be cancelled although its client came back in time.
const TURN_LIMIT: Duration = Duration::from_secs(4);

/// The queues of resumes, by call.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<CallId, Queue>>);

/// The resumes of one call.
struct Queue {
    /// Of a single permit: a tokio semaphore is fair.
    semaphore: Arc<Semaphore>,
    /// How many wait or have their turn. The last one takes the queue away.
    turns: usize,
}

/// A resume that waits for its turn, or has it. The next one has its turn when this is dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    call: CallId,
    semaphore: Arc<Semaphore>,
    /// `None` before its turn, or if the one before took too long.
    permit: Option<OwnedSemaphorePermit>,
}

// === impl Turns ===

impl Turns {
    pub(super) fn enter(self: &Arc<Self>, call: CallId) -> Turn {
        let mut turns = lock(&self.0);
        let queue = turns.entry(call).or_insert_with(|| Queue {
            semaphore: Arc::new(Semaphore::new(1)),
            turns: 0,
        });
        queue.turns += 1;
        Turn {
            turns: self.clone(),
            call,
            semaphore: queue.semaphore.clone(),
            permit: None,
        }
    }

    fn leave(&self, call: CallId) {
        let mut turns = lock(&self.0);
        if let Entry::Occupied(mut queue) = turns.entry(call) {
            let left = queue.get().turns.saturating_sub(1);
            queue.get_mut().turns = left;
            if left == 0 {
                queue.remove();
            }
        }
    }
}

// === impl Turn ===

impl Turn {
    /// Waits for those that came before, but not for long.
    pub(super) async fn come(mut self) -> Self {
        let permit = migrating_timeout(TURN_LIMIT, self.semaphore.clone().acquire_owned()).await;
        self.permit = permit.and_then(Result::ok);
        self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.permit = None;
        self.turns.leave(self.call);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn turns_that_end_at_the_same_time_leave_nothing_behind() {
        const CALLS: usize = 50_000;
        let turns = Arc::new(Turns::default());
        let ids = || (0..CALLS).map(|_| CallId::next());
        let pairs = ids().map(|id| [(), ()].map(|()| turns.enter(id)));
        let (first, second): (Vec<_>, Vec<_>) = pairs.map(|[a, b]| (a, b)).unzip();
        let barrier = &Barrier::new(2);
        thread::scope(|scope| {
            for turns in [first, second] {
                scope.spawn(move || {
                    for turn in turns {
                        barrier.wait();
                        drop(turn);
                    }
                });
            }
        });
        assert_eq!(turns.0.lock().unwrap().len(), 0, "of {CALLS}");
    }
}
