//! A queue of log lines waiting to be written to standard error.
//!
//! 1. **Logging never waits for standard error and never fails.** Only the queue's own thread writes to standard error, which
//!    may be closed, full, or not being read.
//! 2. **The queue is bounded.** A line that would exceed [`MAX_QUEUED`] is dropped, as is a line that can't be written. Only
//!    the line that reports dropped lines may exceed the limit.
//! 3. **Every dropped line is counted.** After the next successful write, a line reports the count.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use crate::lock::lock;

/// Maximum number of queued bytes.
///
/// This is enough for a drain to log a line for each of 4,096 cancelled calls.
const MAX_QUEUED: usize = 1024 * 1024;

/// Maximum capacity retained by a buffer after it has been written.
const KEPT_CAPACITY: usize = 64 * 1024;

/// Delay before retrying a write while standard error is non-blocking and full.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Number of lines that this process has dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A writer for log lines. Clones share the queue.
#[derive(Clone)]
pub(super) struct Queue(Arc<Shared>);

/// State shared by a queue's clones and its writer thread.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// The writer thread. Its own lines are always queued, because they report dropped lines.
    writer: OnceLock<ThreadId>,
}

#[derive(Default)]
struct State {
    lines: Vec<u8>,
    /// Whether the writer thread has taken lines that it has yet to write.
    is_writing: bool,
    /// Number of dropped lines that have yet to be reported.
    dropped: u64,
}

/// Returns the number of lines that this process has dropped.
pub(super) fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

// === impl Queue ===

impl Queue {
    /// Starts the writer thread.
    ///
    /// When the thread can write again after dropping lines, it calls `report` with the number of dropped lines.
    pub(super) fn start(
        to: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            writer: OnceLock::new(),
        });
        let writer = shared.clone();
        let thread = thread::Builder::new().name("log".to_owned());
        // Never join the thread: a write to a pipe that is not being read can't be interrupted.
        thread.spawn(move || writer.write_to(to, report))?;
        Ok(Self(shared))
    }

    /// Waits up to `limit` for all lines to be written.
    pub(super) fn flush(&self, limit: Duration) {
        let state = self.0.state();
        let is_busy = |state: &mut State| state.is_writing || !state.lines.is_empty();
        let _waited = self.0.changed.wait_timeout_while(state, limit, is_busy);
    }
}

impl Write for Queue {
    /// Queues or drops the entire line. Never fails, and claims to have written the line either way.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self.0.state();
        if state.lines.len() + line.len() <= MAX_QUEUED || self.0.is_writer() {
            state.lines.extend_from_slice(line);
        } else {
            state.add_dropped(1);
        }
        drop(state);
        self.0.changed.notify_all();
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

// === impl Shared ===

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn is_writer(&self) -> bool {
        self.writer.get() == Some(&thread::current().id())
    }

    fn write_to(&self, mut to: impl Write, report: impl Fn(u64)) {
        let _ = self.writer.set(thread::current().id());
        let mut lines = Vec::new();
        loop {
            self.take(&mut lines);
            let lost = write_all(&mut to, &lines);
            lines.clear();
            lines.shrink_to(KEPT_CAPACITY);
            let mut state = self.state();
            let dropped = if lost == 0 {
                mem::take(&mut state.dropped)
            } else {
                state.add_dropped(lost);
                0
            };
            // `report` writes a line, which takes the lock again.
            drop(state);
            if dropped > 0 {
                report(dropped);
            }
        }
    }

    /// Waits for lines, then swaps them into `lines`, which must be empty.
    fn take(&self, lines: &mut Vec<u8>) {
        let mut state = self.state();
        state.is_writing = false;
        self.changed.notify_all();
        while state.lines.is_empty() {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        mem::swap(&mut state.lines, lines);
        state.is_writing = true;
    }
}

// === impl State ===

impl State {
    fn add_dropped(&mut self, lines: u64) {
        self.dropped += lines;
        DROPPED.fetch_add(lines, Ordering::Relaxed);
    }
}

/// Writes `lines`, retrying while standard error is full.
///
/// Returns how many lines could not be written in full.
fn write_all(to: &mut impl Write, mut lines: &[u8]) -> u64 {
    while !lines.is_empty() {
        match to.write(lines) {
            Ok(1..) if to.flush().is_err() => break,
            Ok(written @ 1..) => lines = lines.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::park_timeout(RETRY_DELAY)
            }
            Ok(0) | Err(_) => break,
        }
    }
    let line_ends = lines.iter().filter(|byte| **byte == b'\n').count();
    line_ends.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LINE: &[u8] = &[b'x'; 1024];

    /// A writer that the test can block, and that can fail.
    struct Slow {
        permits: Receiver<io::Result<()>>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.permits.recv().map_err(io::Error::other)??;
            self.written.send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Case {
        queue: Queue,
        permit: Sender<io::Result<()>>,
        written: Receiver<Vec<u8>>,
        reported: Receiver<u64>,
    }

    fn case() -> Case {
        let (permit, permits) = channel();
        let (write, written) = channel();
        let (report, reported) = channel();
        let slow = Slow {
            permits,
            written: write,
        };
        let queue = Queue::start(slow, move |dropped| report.send(dropped).unwrap()).unwrap();
        Case {
            queue,
            permit,
            written,
            reported,
        }
    }

    #[test]
    fn lines_beyond_the_limit_are_dropped_and_counted() {
        let mut case = case();
        case.queue.write_all(b"first\n").unwrap();
        while !case.queue.0.state().is_writing {
            thread::yield_now();
        }
        for _ in 0..MAX_QUEUED / LINE.len() + 7 {
            case.queue.write_all(LINE).unwrap();
        }
        assert_eq!(case.queue.0.state().lines.len(), MAX_QUEUED);
        case.permit.send(Ok(())).unwrap();
        assert_eq!(case.written.recv().unwrap(), b"first\n");
        assert_eq!(case.reported.recv().unwrap(), 7);
        case.permit.send(Ok(())).unwrap();
        assert_eq!(case.written.recv().unwrap().len(), MAX_QUEUED);
        case.queue.flush(Duration::from_secs(10));
        assert!(!case.queue.0.state().is_writing);
        assert!(case.queue.0.state().lines.capacity() <= KEPT_CAPACITY);
    }

    #[test]
    fn failed_lines_are_reported_after_the_next_successful_write() {
        let mut case = case();
        case.queue.write_all(b"one\ntwo\n").unwrap();
        case.permit.send(Err(ErrorKind::BrokenPipe.into())).unwrap();
        case.queue.flush(Duration::from_secs(10));
        case.queue.write_all(b"three\n").unwrap();
        case.permit
            .send(Err(ErrorKind::Interrupted.into()))
            .unwrap();
        case.permit.send(Err(ErrorKind::WouldBlock.into())).unwrap();
        case.permit.send(Ok(())).unwrap();
        assert_eq!(case.written.recv().unwrap(), b"three\n");
        assert_eq!(case.reported.recv().unwrap(), 2);
    }

    #[test]
    fn a_flush_waits_no_longer_than_its_limit() {
        let mut case = case();
        case.queue.write_all(b"stuck\n").unwrap();
        case.queue.flush(Duration::from_millis(20));
        assert!(case.written.try_recv().is_err());
    }
}
