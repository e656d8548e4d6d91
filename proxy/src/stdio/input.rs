//! Queues messages for a process and writes them to its stdin.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::routing::MAX_OPEN;

/// Maximum number of queued messages.
///
/// This equals the maximum number of open calls, because a client may send all of them at once.
const MAX_MESSAGES: usize = MAX_OPEN;

/// Maximum number of additional cancellations: one per open call.
///
/// A full queue must not block a cancellation, and if a client disconnects, all of its calls may be cancelled at once.
const MAX_EXTRA_CANCELS: usize = MAX_OPEN;

/// Maximum number of queued bytes: twice the maximum size of a message.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// Maximum number of bytes in additional cancellations.
///
/// These bytes are counted separately, so that large messages can't block a cancellation.
const MAX_EXTRA_CANCEL_BYTES: usize = 256 * 1024;

/// How long a process may leave its stdin unread before it is killed.
///
/// A process is killed after [`WRITE_CHECKS`] failed checks. If the proxy itself stalls, with or without the process, at most
/// one check fails.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of checks within [`WRITE_TIMEOUT`].
const WRITE_CHECKS: u32 = 30;

/// The sending end of the queue.
#[derive(Debug)]
pub(super) struct Input {
    /// The channel's capacity is [`MAX_MESSAGES`] + [`MAX_EXTRA_CANCELS`].
    queue: mpsc::Sender<QueuedLine>,
    messages: Capacity,
    /// For cancellations that exceed the capacity for messages.
    cancels: Capacity,
}

/// The receiving end of the queue.
#[derive(Debug)]
pub(super) struct InputWriter(mpsc::Receiver<QueuedLine>);

/// Free capacity, in messages and in bytes.
#[derive(Debug)]
struct Capacity {
    permits: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// The capacity taken up by a message. Dropping this releases it.
#[derive(Debug)]
struct CapacityGuard {
    _permit: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

/// A permit to send one message.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    permit: mpsc::Permit<'a, QueuedLine>,
    taken: CapacityGuard,
}

/// The reason no capacity could be reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TryReserveError {
    /// The capacity is exhausted.
    Full,
    /// The receiving end has been dropped.
    Closed,
}

/// The reason writing stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The process has closed its stdin, or the sending end of the queue has been dropped.
    Closed,
    /// The process has not read its stdin for [`WRITE_TIMEOUT`].
    Stuck,
}

/// Whether the process is blocked because a client is not reading its output.
///
/// While it is blocked, a process may also leave its stdin unread, and must not be killed for that.
#[derive(Debug, Default)]
pub(super) struct Backpressure {
    is_on: AtomicBool,
    /// Number of times the process has become unblocked.
    unblocked_count: AtomicU64,
}

#[derive(Debug)]
struct QueuedLine {
    line: Bytes,
    _taken: CapacityGuard,
}

/// Creates an empty queue.
pub(super) fn queue() -> (Input, InputWriter) {
    let (queue, writer) = mpsc::channel(MAX_MESSAGES + MAX_EXTRA_CANCELS);
    let input = Input {
        queue,
        messages: Capacity::new(MAX_MESSAGES, MAX_BYTES),
        cancels: Capacity::new(MAX_EXTRA_CANCELS, MAX_EXTRA_CANCEL_BYTES),
    };
    (input, InputWriter(writer))
}

// === impl Input ===

impl Input {
    /// Reserves capacity for a message of this length.
    ///
    /// A cancellation may also use the capacity set aside for cancellations.
    pub(super) fn try_reserve(
        &self,
        length: usize,
        is_cancel: bool,
    ) -> Result<Permit<'_>, TryReserveError> {
        if self.queue.is_closed() {
            return Err(TryReserveError::Closed);
        }
        let taken = match self.messages.try_take(length) {
            None if is_cancel => self.cancels.try_take(length),
            taken => taken,
        };
        let taken = taken.ok_or(TryReserveError::Full)?;
        let permit = self
            .queue
            .try_reserve()
            .map_err(|_| TryReserveError::Full)?;
        Ok(Permit { permit, taken })
    }
}

// === impl Capacity ===

impl Capacity {
    fn new(permits: usize, bytes: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(permits)),
            bytes: Arc::new(Semaphore::new(bytes)),
        }
    }

    /// Takes a permit and this many bytes, or returns `None` if there is not enough capacity.
    fn try_take(&self, bytes: usize) -> Option<CapacityGuard> {
        let bytes = bytes.try_into().ok()?;
        Some(CapacityGuard {
            _permit: self.permits.clone().try_acquire_owned().ok()?,
            _bytes: self.bytes.clone().try_acquire_many_owned(bytes).ok()?,
        })
    }
}

// === impl Permit ===

impl Permit<'_> {
    /// Sends a message, which must be on one line.
    pub(super) fn send(self, line: Bytes) {
        let _taken = self.taken;
        self.permit.send(QueuedLine { line, _taken });
    }
}

// === impl InputWriter ===

impl InputWriter {
    /// Writes queued messages, and returns why writing stopped.
    ///
    /// If the process was blocked during a check, [`WRITE_TIMEOUT`] restarts.
    pub(super) async fn write(
        mut self,
        mut to: impl AsyncWrite + Unpin,
        backpressure: &Backpressure,
    ) -> Stopped {
        while let Some(next) = self.0.recv().await {
            let mut rest = next.line.chain(&b"\n"[..]);
            let mut failed_checks = 0;
            while rest.has_remaining() {
                let before = backpressure.unblocked_count();
                match timeout(WRITE_TIMEOUT / WRITE_CHECKS, to.write_buf(&mut rest)).await {
                    Ok(Ok(1..)) => failed_checks = 0,
                    Ok(_) => return Stopped::Closed,
                    Err(_) if backpressure.is_on() || backpressure.unblocked_count() != before => {
                        failed_checks = 0
                    }
                    Err(_) => failed_checks += 1,
                }
                if failed_checks == WRITE_CHECKS {
                    return Stopped::Stuck;
                }
            }
        }
        Stopped::Closed
    }
}

// === impl Backpressure ===

impl Backpressure {
    /// Awaits a future, marking the process as blocked while the future is pending.
    ///
    /// Only await one future at a time. If this is dropped while the future is pending, the process remains marked as blocked.
    pub(super) async fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        if let Some(done) = futures_util::future::poll_immediate(future.as_mut()).await {
            return done;
        }
        self.is_on.store(true, Ordering::Relaxed);
        let done = future.await;
        self.unblocked_count.fetch_add(1, Ordering::Relaxed);
        self.is_on.store(false, Ordering::Relaxed);
        done
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn unblocked_count(&self) -> u64 {
        self.unblocked_count.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, iter, sync::Barrier, thread};

    use tokio::{
        io::{AsyncReadExt as _, duplex},
        time::Instant,
    };

    use super::*;

    fn line(length: usize) -> Bytes {
        vec![b'x'; length].into()
    }

    #[tokio::test]
    async fn messages_are_written_as_lines_in_order() {
        let (input, writer) = queue();
        input.try_reserve(3, false).unwrap().send("one".into());
        input.try_reserve(3, false).unwrap().send("two".into());
        drop(input);
        let (to, mut from) = duplex(2);
        let mut text = String::new();
        let backpressure = Backpressure::default();
        let (stopped, _) = tokio::join!(
            writer.write(to, &backpressure),
            from.read_to_string(&mut text)
        );
        assert_eq!((stopped, &*text), (Stopped::Closed, "one\ntwo\n"));
    }

    #[tokio::test]
    async fn a_full_queue_accepts_only_cancels() {
        let (input, writer) = queue();
        for _ in 0..MAX_MESSAGES {
            input.try_reserve(1, false).unwrap().send(line(1));
        }
        assert_eq!(
            input.try_reserve(1, false).unwrap_err(),
            TryReserveError::Full
        );
        for _ in 0..MAX_EXTRA_CANCELS {
            input.try_reserve(1, true).unwrap().send(line(1));
        }
        assert_eq!(
            input.try_reserve(1, true).unwrap_err(),
            TryReserveError::Full
        );
        drop(writer);
        assert_eq!(
            input.try_reserve(1, true).unwrap_err(),
            TryReserveError::Closed
        );
    }

    #[test]
    fn concurrent_messages_never_take_the_capacity_of_cancels() {
        for _ in 0..500 {
            let (input, _writer) = queue();
            let barrier = Barrier::new(8);
            let try_take = || {
                barrier.wait();
                iter::from_fn(|| input.try_reserve(1, false).ok())
                    .map(|permit| permit.send(line(1)))
                    .count()
            };
            let taken: usize = thread::scope(|scope| {
                let takers: Vec<_> = (0..8).map(|_| scope.spawn(try_take)).collect();
                takers.into_iter().map(|taker| taker.join().unwrap()).sum()
            });
            assert_eq!(taken, MAX_MESSAGES);
        }
    }

    #[tokio::test]
    async fn all_open_calls_can_be_cancelled_at_once() {
        let (input, _writer) = queue();
        for _ in 0..MAX_MESSAGES {
            input.try_reserve(1, false).unwrap().send(line(1));
        }
        for _ in 0..MAX_OPEN {
            // A cancellation from the layer is about 200 bytes long.
            input.try_reserve(200, true).unwrap().send(line(200));
        }
    }

    #[tokio::test]
    async fn large_messages_fill_the_queue_sooner_and_release_their_capacity() {
        let (input, mut writer) = queue();
        input
            .try_reserve(MAX_BYTES - 1, false)
            .unwrap()
            .send(line(MAX_BYTES - 1));
        assert_eq!(
            input.try_reserve(2, false).unwrap_err(),
            TryReserveError::Full
        );
        drop(writer.0.recv().await);
        assert!(input.try_reserve(MAX_BYTES, false).is_ok());
    }

    #[tokio::test]
    async fn large_messages_leave_room_for_cancels() {
        let (input, _writer) = queue();
        for _ in 0..2 {
            let permit = input.try_reserve(MAX_BYTES / 2, false).unwrap();
            permit.send(line(MAX_BYTES / 2));
        }
        for _ in 0..MAX_EXTRA_CANCELS {
            input
                .try_reserve(MAX_EXTRA_CANCEL_BYTES / MAX_EXTRA_CANCELS, true)
                .unwrap()
                .send(line(1));
        }
        assert_eq!(
            input.try_reserve(1, true).unwrap_err(),
            TryReserveError::Full
        );
        assert_eq!(
            input.try_reserve(1, false).unwrap_err(),
            TryReserveError::Full
        );
    }

    #[tokio::test(start_paused = true)]
    async fn writing_stops_if_the_process_does_not_read() {
        let (input, writer) = queue();
        input.try_reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let started = Instant::now();
        assert_eq!(
            writer.write(to, &Backpressure::default()).await,
            Stopped::Stuck
        );
        assert!(started.elapsed() >= WRITE_TIMEOUT);
    }

    /// `advance` simulates that the proxy is suspended, with or without the process.
    #[tokio::test(start_paused = true)]
    async fn a_stall_of_the_proxy_counts_as_one_check() {
        let (input, writer) = queue();
        input.try_reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let backpressure = Backpressure::default();
        let mut write = std::pin::pin!(writer.write(to, &backpressure));
        let stalled = async {
            tokio::time::sleep(WRITE_TIMEOUT / 3).await;
            tokio::time::advance(2 * WRITE_TIMEOUT).await;
            tokio::time::sleep(WRITE_TIMEOUT / 3).await;
        };
        tokio::select! {
            stopped = &mut write => panic!("{stopped:?}"),
            () = stalled => {}
        }
        assert_eq!(write.await, Stopped::Stuck);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_cannot_write_need_not_read() {
        let (input, writer) = queue();
        input.try_reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let backpressure = Backpressure::default();
        let write = writer.write(to, &backpressure);
        let ten_times = timeout(WRITE_TIMEOUT * 10, backpressure.wait(pending::<()>()));
        tokio::select! {
            stopped = write => panic!("{stopped:?}"),
            late = ten_times => assert!(late.is_err()),
        }
    }

    #[tokio::test]
    async fn writing_stops_if_stdin_is_closed() {
        let (input, writer) = queue();
        input.try_reserve(1, false).unwrap().send(line(1));
        let (to, from) = duplex(1);
        drop(from);
        assert_eq!(
            writer.write(to, &Backpressure::default()).await,
            Stopped::Closed
        );
    }
}
