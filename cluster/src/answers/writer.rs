//! The task that writes answers to the directory. There is one per instance.

use std::{
    future::pending,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rmcp::model::ServerJsonRpcMessage;
use tokio::{
    select,
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use super::queue::{AnswerKey, AnswerQueue, Bound, Operation, Place};
use crate::{
    directory::{Directory as _, DirectoryError, Limited},
    lock::lock,
    rate_limited_warning::RateLimitedWarning,
    wait_until::wait_until,
};

/// Writes the answers to ended calls to the directory, in the order in which the calls ended.
#[derive(Debug)]
pub(super) struct AnswerWriter {
    directory: Limited,
    queue: Mutex<AnswerQueue>,
    /// Wakes [`run`](Self::run).
    has_work: Notify,
    /// Wakes [`flush`](Self::flush).
    progress: Notify,
    /// One for each [`Bound`].
    eviction_warnings: [RateLimitedWarning; 3],
    failure_warning: RateLimitedWarning,
}

/// A reserved place for the answer to a call that has ended. Freed when dropped without an answer.
#[derive(Debug)]
pub(super) struct ReservedPlace {
    writer: Arc<AnswerWriter>,
    place: Place,
}

// === impl AnswerWriter ===

impl AnswerWriter {
    pub(super) fn new(directory: Limited) -> Arc<Self> {
        Arc::new(Self {
            directory,
            queue: Mutex::default(),
            has_work: Notify::new(),
            progress: Notify::new(),
            eviction_warnings: Default::default(),
            failure_warning: RateLimitedWarning::default(),
        })
    }

    /// Reserves the next place. Needs no runtime.
    pub(super) fn reserve(self: &Arc<Self>) -> ReservedPlace {
        ReservedPlace {
            writer: self.clone(),
            place: self.queue().reserve(Instant::now()),
        }
    }

    /// Writes queued answers while it is polled. Must be called only once.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, unwritten answers stay in the queue.
    pub(super) async fn run(self: Arc<Self>) {
        let mut in_flight = FuturesUnordered::new();
        loop {
            let deadline =
                self.start_operations(|operation| in_flight.push(self.carry_out(operation)));
            let deadline = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => pending().await,
                }
            };
            select! {
                Some((operation, result)) = in_flight.next() => self.complete(operation, result),
                () = self.has_work.notified() => {}
                () = deadline => {}
            }
        }
    }

    /// Waits until each answer that is already queued has been written or evicted or has expired.
    ///
    /// Returns `true` unless `deadline` passed first.
    pub(super) async fn flush(&self, deadline: Option<Instant>) -> bool {
        let end = self.queue().end();
        let all_written = wait_until(&self.progress, || self.queue().is_written_until(end));
        match deadline {
            // The rest is left to the task.
            Some(deadline) => timeout_at(deadline, all_written).await.is_ok(),
            None => {
                all_written.await;
                true
            }
        }
    }

    /// Returns `true` if an answer is late.
    pub(super) fn is_late(&self) -> bool {
        self.queue().is_late(Instant::now())
    }

    /// Queues again everything that was written.
    pub(super) fn write_again(&self) {
        self.queue().write_again();
        self.has_work.notify_one();
    }

    /// Removes expired answers and starts operations up to the limits. Warns if an answer expired before it was written.
    ///
    /// Returns when this must be called again, unless an operation completes or work is added first. Returns `None` if nothing is queued.
    fn start_operations(&self, mut start: impl FnMut(Operation)) -> Option<Instant> {
        let now = Instant::now();
        let mut queue = self.queue();
        let has_unwritten = queue.expire(now);
        while let Some(operation) = queue.next_operation(now) {
            start(operation);
        }
        let deadline = queue.next_deadline();
        drop(queue);
        self.progress.notify_waiters();
        if has_unwritten {
            self.warn(Bound::Time);
        }
        deadline
    }

    async fn carry_out(&self, operation: Operation) -> (Operation, Result<(), DirectoryError>) {
        let AnswerKey {
            session,
            generation,
            call,
        } = operation.key;
        let result = match operation.text.clone() {
            Some(text) => {
                let write =
                    self.directory
                        .keep_answer(session, generation, call, text, operation.ttl);
                write.await
            }
            None => {
                self.directory
                    .remove_answer(session, generation, call)
                    .await
            }
        };
        (operation, result)
    }

    fn complete(&self, operation: Operation, result: Result<(), DirectoryError>) {
        let (succeeded, now) = (result.is_ok(), Instant::now());
        self.queue().complete(operation, succeeded, now);
        if let Err(error) = result {
            self.failure_warning.warn(&format_args!(
                "{error}: answers to ended calls are not in the directory yet, and are written again until they are"
            ));
        }
    }

    fn warn(&self, bound: Bound) {
        let [session, instance, time] = &self.eviction_warnings;
        let warning = match bound {
            Bound::Session => session,
            Bound::Instance => instance,
            Bound::Time => time,
        };
        warning.warn(&format_args!(
            "answers to ended calls are evicted, beyond {bound}: once their instance has ended, clients that resume get an error instead"
        ));
    }

    fn queue(&self) -> MutexGuard<'_, AnswerQueue> {
        lock(&self.queue)
    }
}

// === impl ReservedPlace ===

impl ReservedPlace {
    /// Puts an answer in this place. Warns if that exceeds a [`Bound`].
    pub(super) fn put(self, key: AnswerKey, answer: &ServerJsonRpcMessage) {
        let Ok(text) = serde_json::to_vec(answer) else {
            return;
        };
        // A boxed slice has no spare capacity.
        let text = text.into_boxed_slice().into();
        let exceeded = self.writer.queue().put(self.place, key, text);
        self.writer.has_work.notify_one();
        if let Some(bound) = exceeded {
            self.writer.warn(bound);
        }
    }
}

impl Drop for ReservedPlace {
    fn drop(&mut self) {
        self.writer.queue().release(self.place);
        self.writer.progress.notify_waiters();
    }
}
