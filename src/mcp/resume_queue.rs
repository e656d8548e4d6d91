//! Queues each call's resumes, so that the manager receives them one at a time and in order.
//!
//! rmcp hands a call's stream to the latest resume it receives, and ends the previous resume's stream. If several resumes are
//! waiting for room in a session's channel, rmcp might receive them in any order, so the stream could end up with a resume whose
//! client has disconnected.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{call::CallId, lock::lock, timer::migrating_timeout};

/// Maximum time a resume waits for earlier resumes.
///
/// A pending resume postpones its call's deadline by at most 5 s, so the manager has to receive it before then. Otherwise, the
/// call would be cancelled even though its client had resumed in time.
const RESUME_QUEUE_TIMEOUT: Duration = Duration::from_secs(4);

/// The queues of all calls with a pending resume.
#[derive(Default)]
pub(super) struct ResumeQueue(Mutex<HashMap<CallId, CallQueue>>);

struct CallQueue {
    /// Has a single permit, which tokio hands out in order of arrival.
    semaphore: Arc<Semaphore>,
    /// Number of resumes waiting for the permit or holding it. The last resume to leave removes the queue.
    len: usize,
}

/// A resume waiting for its call's permit or holding it.
///
/// Dropping it passes the permit on to the next resume.
pub(super) struct ResumePermit {
    queue: Arc<ResumeQueue>,
    call: CallId,
    semaphore: Arc<Semaphore>,
    /// `None` before [`acquire`](Self::acquire) and after [`RESUME_QUEUE_TIMEOUT`].
    permit: Option<OwnedSemaphorePermit>,
}

// === impl ResumeQueue ===

impl ResumeQueue {
    pub(super) fn enqueue(self: &Arc<Self>, call: CallId) -> ResumePermit {
        let mut queues = lock(&self.0);
        let queue = queues.entry(call).or_insert_with(|| CallQueue {
            semaphore: Arc::new(Semaphore::new(1)),
            len: 0,
        });
        queue.len += 1;
        ResumePermit {
            queue: self.clone(),
            call,
            semaphore: queue.semaphore.clone(),
            permit: None,
        }
    }

    fn dequeue(&self, call: CallId) {
        let mut queues = lock(&self.0);
        if let Entry::Occupied(mut queue) = queues.entry(call) {
            let left = queue.get().len.saturating_sub(1);
            queue.get_mut().len = left;
            if left == 0 {
                queue.remove();
            }
        }
    }
}

// === impl ResumePermit ===

impl ResumePermit {
    /// Waits for earlier resumes, for at most [`RESUME_QUEUE_TIMEOUT`].
    pub(super) async fn acquire(mut self) -> Self {
        let permit =
            migrating_timeout(RESUME_QUEUE_TIMEOUT, self.semaphore.clone().acquire_owned()).await;
        self.permit = permit.and_then(Result::ok);
        self
    }
}

impl Drop for ResumePermit {
    fn drop(&mut self) {
        self.permit = None;
        self.queue.dequeue(self.call);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn permits_dropped_at_the_same_time_leave_no_queue() {
        const CALLS: usize = 50_000;
        let queues = Arc::new(ResumeQueue::default());
        let ids = || (0..CALLS).map(|_| CallId::next());
        let pairs = ids().map(|id| [(), ()].map(|()| queues.enqueue(id)));
        let (first, second): (Vec<_>, Vec<_>) = pairs.map(|[a, b]| (a, b)).unzip();
        let barrier = &Barrier::new(2);
        thread::scope(|scope| {
            for queues in [first, second] {
                scope.spawn(move || {
                    for permit in queues {
                        barrier.wait();
                        drop(permit);
                    }
                });
            }
        });
        assert_eq!(queues.0.lock().unwrap().len(), 0, "of {CALLS}");
    }
}
