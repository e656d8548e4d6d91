//! The messages that wait to be written to a process's stdin.

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

/// How many messages may wait: 1,024, as many as calls may be open, so that a client may make them all at once.
const MAX_MESSAGES: usize = MAX_OPEN;

/// How many more, if they are cancels: one for each call that may be open. A full queue must not keep a call from being
/// cancelled, and a client that goes leaves all of its calls at once.
const MAX_EXTRA_CANCELS: usize = MAX_OPEN;

/// How many bytes may wait: 8 MiB, which is two of the largest messages.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// How many more, if they are cancels: 256 KiB. Cancels are short, and large messages must not keep them out.
const MAX_EXTRA_CANCEL_BYTES: usize = 256 * 1024;

/// How long a process may not read its stdin before it is given up: 30 s.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The end of the queue where messages are put in.
#[derive(Debug)]
pub(super) struct Input {
    /// It has a place for whatever has room.
    queue: mpsc::Sender<QueuedLine>,
    messages: Capacity,
    /// For cancels that find none there.
    cancels: Capacity,
}

/// The end where they are written.
#[derive(Debug)]
pub(super) struct Waiting(mpsc::Receiver<QueuedLine>);

/// How much may wait.
#[derive(Debug)]
struct Capacity {
    permits: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// What one message takes of it, until it is dropped.
#[derive(Debug)]
struct UsedCapacity {
    _permit: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    permit: mpsc::Permit<'a, QueuedLine>,
    taken: UsedCapacity,
}

/// There is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    Busy,
    /// Nobody writes any more.
    Closed,
}

/// Why nothing is written any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The process has closed its stdin.
    Closed,
    /// It does not read.
    Stuck,
}

/// Whether the process is kept from writing: a client does not read what it wrote. Then it may not read either, and that
/// is not its fault.
#[derive(Debug, Default)]
pub(super) struct Backpressure {
    is_on: AtomicBool,
    times: AtomicU64,
}

#[derive(Debug)]
struct QueuedLine {
    line: Bytes,
    _taken: UsedCapacity,
}

/// A queue without a message.
pub(super) fn queue() -> (Input, Waiting) {
    let (queue, waiting) = mpsc::channel(MAX_MESSAGES + MAX_EXTRA_CANCELS);
    let input = Input {
        queue,
        messages: Capacity::new(MAX_MESSAGES, MAX_BYTES),
        cancels: Capacity::new(MAX_EXTRA_CANCELS, MAX_EXTRA_CANCEL_BYTES),
    };
    (input, Waiting(waiting))
}

// === impl Input ===

impl Input {
    /// A place for a message of so many bytes.
    pub(super) fn reserve(&self, length: usize, is_cancel: bool) -> Result<Permit<'_>, Full> {
        if self.queue.is_closed() {
            return Err(Full::Closed);
        }
        let taken = match self.messages.try_take(length) {
            None if is_cancel => self.cancels.try_take(length),
            taken => taken,
        };
        let taken = taken.ok_or(Full::Busy)?;
        let permit = self.queue.try_reserve().map_err(|_| Full::Busy)?;
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

    /// Takes a place and so many bytes, if both are there.
    fn try_take(&self, bytes: usize) -> Option<UsedCapacity> {
        let bytes = bytes.try_into().ok()?;
        Some(UsedCapacity {
            _permit: self.permits.clone().try_acquire_owned().ok()?,
            _bytes: self.bytes.clone().try_acquire_many_owned(bytes).ok()?,
        })
    }
}

// === impl Permit ===

impl Permit<'_> {
    /// Puts in a message, which must be on one line.
    pub(super) fn send(self, line: Bytes) {
        let _taken = self.taken;
        self.permit.send(QueuedLine { line, _taken });
    }
}

// === impl Waiting ===

impl Waiting {
    /// Writes what waits, until that is not possible any more.
    pub(super) async fn write(
        mut self,
        mut to: impl AsyncWrite + Unpin,
        backpressure: &Backpressure,
    ) -> Stopped {
        while let Some(next) = self.0.recv().await {
            let mut rest = next.line.chain(&b"\n"[..]);
            while rest.has_remaining() {
                let before = backpressure.times();
                match timeout(WRITE_TIMEOUT, to.write_buf(&mut rest)).await {
                    Ok(Ok(1..)) => {}
                    Ok(_) => return Stopped::Closed,
                    Err(_) if backpressure.is_on() || backpressure.times() != before => {}
                    Err(_) => return Stopped::Stuck,
                }
            }
        }
        Stopped::Closed
    }
}

// === impl Backpressure ===

impl Backpressure {
    /// Waits for what may keep the process from writing.
    pub(super) async fn wait<T>(&self, until: impl Future<Output = T>) -> T {
        let mut until = std::pin::pin!(until);
        if let Some(done) = futures_util::future::poll_immediate(until.as_mut()).await {
            return done;
        }
        self.is_on.store(true, Ordering::Relaxed);
        let done = until.await;
        self.times.fetch_add(1, Ordering::Relaxed);
        self.is_on.store(false, Ordering::Relaxed);
        done
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn times(&self) -> u64 {
        self.times.load(Ordering::Relaxed)
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
    async fn messages_are_written_as_lines_in_their_order() {
        let (input, waiting) = queue();
        input.reserve(3, false).unwrap().send("one".into());
        input.reserve(3, false).unwrap().send("two".into());
        drop(input);
        let (to, mut from) = duplex(2);
        let mut text = String::new();
        let backpressure = Backpressure::default();
        let (stopped, _) = tokio::join!(
            waiting.write(to, &backpressure),
            from.read_to_string(&mut text)
        );
        assert_eq!((stopped, &*text), (Stopped::Closed, "one\ntwo\n"));
    }

    #[tokio::test]
    async fn a_full_queue_has_places_for_cancels_only() {
        let (input, waiting) = queue();
        for _ in 0..MAX_MESSAGES {
            input.reserve(1, false).unwrap().send(line(1));
        }
        assert_eq!(input.reserve(1, false).unwrap_err(), Full::Busy);
        for _ in 0..MAX_EXTRA_CANCELS {
            input.reserve(1, true).unwrap().send(line(1));
        }
        assert_eq!(input.reserve(1, true).unwrap_err(), Full::Busy);
        drop(waiting);
        assert_eq!(input.reserve(1, true).unwrap_err(), Full::Closed);
    }

    #[test]
    fn messages_that_come_at_once_never_take_the_places_of_cancels() {
        for _ in 0..500 {
            let (input, _waiting) = queue();
            let barrier = Barrier::new(8);
            let try_take = || {
                barrier.wait();
                iter::from_fn(|| input.reserve(1, false).ok())
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
    async fn every_call_that_may_be_open_can_be_cancelled_at_once() {
        let (input, _waiting) = queue();
        for _ in 0..MAX_MESSAGES {
            input.reserve(1, false).unwrap().send(line(1));
        }
        for _ in 0..MAX_OPEN {
            // What the layer sends takes about so much.
            input.reserve(200, true).unwrap().send(line(200));
        }
    }

    #[tokio::test]
    async fn large_messages_fill_it_sooner_and_give_their_room_back() {
        let (input, mut waiting) = queue();
        input
            .reserve(MAX_BYTES - 1, false)
            .unwrap()
            .send(line(MAX_BYTES - 1));
        assert_eq!(input.reserve(2, false).unwrap_err(), Full::Busy);
        drop(waiting.0.recv().await);
        assert!(input.reserve(MAX_BYTES, false).is_ok());
    }

    #[tokio::test]
    async fn large_messages_leave_room_for_cancels() {
        let (input, _waiting) = queue();
        for _ in 0..2 {
            let permit = input.reserve(MAX_BYTES / 2, false).unwrap();
            permit.send(line(MAX_BYTES / 2));
        }
        for _ in 0..MAX_EXTRA_CANCELS {
            input
                .reserve(MAX_EXTRA_CANCEL_BYTES / MAX_EXTRA_CANCELS, true)
                .unwrap()
                .send(line(1));
        }
        assert_eq!(input.reserve(1, true).unwrap_err(), Full::Busy);
        assert_eq!(input.reserve(1, false).unwrap_err(), Full::Busy);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_does_not_read_is_given_up() {
        let (input, waiting) = queue();
        input.reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let begun = Instant::now();
        assert_eq!(
            waiting.write(to, &Backpressure::default()).await,
            Stopped::Stuck
        );
        assert!(begun.elapsed() >= WRITE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_may_not_write_need_not_read() {
        let (input, waiting) = queue();
        input.reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let backpressure = Backpressure::default();
        let write = waiting.write(to, &backpressure);
        let ten_times = timeout(WRITE_TIMEOUT * 10, backpressure.wait(pending::<()>()));
        tokio::select! {
            stopped = write => panic!("{stopped:?}"),
            late = ten_times => assert!(late.is_err()),
        }
    }

    #[tokio::test]
    async fn a_stdin_that_is_closed_ends_the_writing() {
        let (input, waiting) = queue();
        input.reserve(1, false).unwrap().send(line(1));
        let (to, from) = duplex(1);
        drop(from);
        assert_eq!(
            waiting.write(to, &Backpressure::default()).await,
            Stopped::Closed
        );
    }
}
