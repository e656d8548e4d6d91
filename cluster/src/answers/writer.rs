//! The task that writes answers to the directory. Each instance has one.

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
    /// One warning for each [`Bound`].
    eviction_warnings: [RateLimitedWarning; 3],
    failure_warning: RateLimitedWarning,
}

/// A place reserved for the answer to an ended call. Dropping it without an answer frees the place.
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

    /// Reserves the next place. This does not require a runtime.
    pub(super) fn reserve(self: &Arc<Self>) -> ReservedPlace {
        ReservedPlace {
            writer: self.clone(),
            place: self.queue().reserve(Instant::now()),
        }
    }

    /// Writes queued answers for as long as it is polled. Must be called at most once.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, unwritten answers stay in the queue.
    pub(super) async fn run(self: Arc<Self>) {
        let mut in_flight = FuturesUnordered::new();
        loop {
            let deadline =
                self.start_operations(|operation| in_flight.push(self.execute(operation)));
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

    /// Waits until every answer queued so far has been written or evicted, or has expired.
    ///
    /// Returns `true` unless `deadline` passed first.
    pub(super) async fn flush(&self, deadline: Option<Instant>) -> bool {
        let end = self.queue().end();
        let all_written = wait_until(&self.progress, || self.queue().is_written_until(end));
        match deadline {
            // On a timeout, the task still writes the rest.
            Some(deadline) => timeout_at(deadline, all_written).await.is_ok(),
            None => {
                all_written.await;
                true
            }
        }
    }

    /// Returns `true` if any answer is late.
    pub(super) fn has_late_answers(&self) -> bool {
        self.queue().has_late_answers(Instant::now())
    }

    /// Requeues all written answers.
    pub(super) fn write_again(&self) {
        self.queue().write_again();
        self.has_work.notify_one();
    }

    /// Removes expired answers, then starts as many operations as the limits allow.
    ///
    /// Warns if an answer expired before it was written.
    ///
    /// Returns when to call this again, if no operation completes and no work is added before then. Returns `None` if nothing is queued.
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

    async fn execute(&self, operation: Operation) -> (Operation, Result<(), DirectoryError>) {
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
                "{error}: answers to ended calls are not in the directory yet; retrying until they are"
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
            "answers to ended calls exceed {bound} and are being evicted: once this instance has exited, resuming clients will get an error instead"
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
