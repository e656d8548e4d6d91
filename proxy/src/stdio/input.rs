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
const MESSAGES: usize = MAX_OPEN;

/// How many more, if they are cancels: one for each call that may be open. A full queue must not keep a call from being
/// cancelled, and a client that goes leaves all of its calls at once.
const CANCELS: usize = MAX_OPEN;

/// How many bytes may wait: 8 MiB, which is two of the largest messages.
const BYTES: usize = 8 * 1024 * 1024;

/// How many more, if they are cancels: 256 KiB. Cancels are short, and large messages must not keep them out.
const CANCEL_BYTES: usize = 256 * 1024;

/// How long a process may not read its stdin before it is given up: 30 s.
const PATIENCE: Duration = Duration::from_secs(30);

/// The end of the queue where messages are put in.
#[derive(Debug)]
pub(super) struct Input {
    /// It has a place for whatever has room.
    queue: mpsc::Sender<Queued>,
    messages: Room,
    /// For cancels that find none there.
    cancels: Room,
}

/// The end where they are written.
#[derive(Debug)]
pub(super) struct Waiting(mpsc::Receiver<Queued>);

/// How much may wait.
#[derive(Debug)]
struct Room {
    places: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// What one message takes of it, until it is dropped.
#[derive(Debug)]
struct Taken {
    _place: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct Place<'a> {
    place: mpsc::Permit<'a, Queued>,
    taken: Taken,
}

/// There is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    Busy,
    /// Nobody writes any more.
    Gone,
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
pub(super) struct Jam {
    is_on: AtomicBool,
    times: AtomicU64,
}

#[derive(Debug)]
struct Queued {
    line: Bytes,
    _taken: Taken,
}

/// A queue without a message.
pub(super) fn queue() -> (Input, Waiting) {
    let (queue, waiting) = mpsc::channel(MESSAGES + CANCELS);
    let input = Input {
        queue,
        messages: Room::new(MESSAGES, BYTES),
        cancels: Room::new(CANCELS, CANCEL_BYTES),
    };
    (input, Waiting(waiting))
}

// === impl Input ===

impl Input {
    /// A place for a message of so many bytes.
    pub(super) fn reserve(&self, length: usize, is_cancel: bool) -> Result<Place<'_>, Full> {
        if self.queue.is_closed() {
            return Err(Full::Gone);
        }
        let taken = match self.messages.take(length) {
            None if is_cancel => self.cancels.take(length),
            taken => taken,
        };
        let taken = taken.ok_or(Full::Busy)?;
        let place = self.queue.try_reserve().map_err(|_| Full::Busy)?;
        Ok(Place { place, taken })
    }
}

// === impl Room ===

impl Room {
    fn new(places: usize, bytes: usize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(places)),
            bytes: Arc::new(Semaphore::new(bytes)),
        }
    }

    /// Takes a place and so many bytes, if both are there.
    fn take(&self, bytes: usize) -> Option<Taken> {
        let bytes = bytes.try_into().ok()?;
        Some(Taken {
            _place: self.places.clone().try_acquire_owned().ok()?,
            _bytes: self.bytes.clone().try_acquire_many_owned(bytes).ok()?,
        })
    }
}

// === impl Place ===

impl Place<'_> {
    /// Puts in a message, which must be on one line.
    pub(super) fn send(self, line: Bytes) {
        let _taken = self.taken;
        self.place.send(Queued { line, _taken });
    }
}

// === impl Waiting ===

impl Waiting {
    /// Writes what waits, until that is not possible any more.
    pub(super) async fn write(mut self, mut to: impl AsyncWrite + Unpin, jam: &Jam) -> Stopped {
        while let Some(next) = self.0.recv().await {
            let mut rest = next.line.chain(&b"\n"[..]);
            while rest.has_remaining() {
                let seen = jam.times();
                match timeout(PATIENCE, to.write_buf(&mut rest)).await {
                    Ok(Ok(1..)) => {}
                    Ok(_) => return Stopped::Closed,
                    Err(_) if jam.is_on() || jam.times() != seen => {}
                    Err(_) => return Stopped::Stuck,
                }
            }
        }
        Stopped::Closed
    }
}

// === impl Jam ===

impl Jam {
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

    fn is_on(&self) -> bool {
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
        let jam = Jam::default();
        let (stopped, _) = tokio::join!(waiting.write(to, &jam), from.read_to_string(&mut text));
        assert_eq!((stopped, &*text), (Stopped::Closed, "one\ntwo\n"));
    }

    #[tokio::test]
    async fn a_full_queue_has_places_for_cancels_only() {
        let (input, waiting) = queue();
        for _ in 0..MESSAGES {
            input.reserve(1, false).unwrap().send(line(1));
        }
        assert_eq!(input.reserve(1, false).unwrap_err(), Full::Busy);
        for _ in 0..CANCELS {
            input.reserve(1, true).unwrap().send(line(1));
        }
        assert_eq!(input.reserve(1, true).unwrap_err(), Full::Busy);
        drop(waiting);
        assert_eq!(input.reserve(1, true).unwrap_err(), Full::Gone);
    }

    #[test]
    fn messages_that_come_at_once_never_take_the_places_of_cancels() {
        for _ in 0..500 {
            let (input, _waiting) = queue();
            let barrier = Barrier::new(8);
            let take = || {
                barrier.wait();
                iter::from_fn(|| input.reserve(1, false).ok())
                    .map(|place| place.send(line(1)))
                    .count()
            };
            let taken: usize = thread::scope(|scope| {
                let takers: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
                takers.into_iter().map(|taker| taker.join().unwrap()).sum()
            });
            assert_eq!(taken, MESSAGES);
        }
    }

    #[tokio::test]
    async fn every_call_that_may_be_open_can_be_cancelled_at_once() {
        let (input, _waiting) = queue();
        for _ in 0..MESSAGES {
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
            .reserve(BYTES - 1, false)
            .unwrap()
            .send(line(BYTES - 1));
        assert_eq!(input.reserve(2, false).unwrap_err(), Full::Busy);
        drop(waiting.0.recv().await);
        assert!(input.reserve(BYTES, false).is_ok());
    }

    #[tokio::test]
    async fn large_messages_leave_room_for_cancels() {
        let (input, _waiting) = queue();
        for _ in 0..2 {
            let place = input.reserve(BYTES / 2, false).unwrap();
            place.send(line(BYTES / 2));
        }
        for _ in 0..CANCELS {
            input
                .reserve(CANCEL_BYTES / CANCELS, true)
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
        assert_eq!(waiting.write(to, &Jam::default()).await, Stopped::Stuck);
        assert!(begun.elapsed() >= PATIENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_may_not_write_need_not_read() {
        let (input, waiting) = queue();
        input.reserve(10, false).unwrap().send(line(10));
        let (to, _from) = duplex(4);
        let jam = Jam::default();
        let write = waiting.write(to, &jam);
        let ten_times = timeout(PATIENCE * 10, jam.wait(pending::<()>()));
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
        assert_eq!(waiting.write(to, &Jam::default()).await, Stopped::Closed);
    }
}
