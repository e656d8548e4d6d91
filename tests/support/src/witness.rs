//! Records what happens to each tool handler. Handlers write to it and tests await it.
//!
//! Contract:
//! 1. Each label belongs to one call. If a label starts again, a new [`HandlerRecord`] with a higher
//!    [`HandlerRecord::starts`] replaces the old one, and the former handler is no longer counted.
//! 2. A wait also sees what happened before it, so it cannot miss its event.
//! 3. A release is stored, so it may precede the start of the call.
//! 4. [`End::Completed`] means that the handler has returned an answer, not that the answer has been delivered.
//! 5. Times are from tokio's clock, so they can be compared while it is paused.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tokio::{sync::watch, time::Instant};

use super::limit::within;

/// The log, which all clones share.
#[derive(Clone, Debug)]
pub struct Witness {
    log: Arc<watch::Sender<Log>>,
}

/// What is known about the newest handler with a label.
#[derive(Clone, Debug)]
pub struct HandlerRecord {
    /// The number of handlers that have started with this label.
    ///
    /// It is 1 unless a call was executed twice.
    pub starts: usize,
    /// When the newest of them started.
    pub started: Instant,
    /// When it saw its token fire, even if it has kept running.
    pub token_fired: Option<Instant>,
    /// How it ended, or `None` if it is still running.
    pub end: Option<End>,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It stopped because it saw its token fire.
    Cancelled {
        /// When it stopped.
        at: Instant,
    },
    /// It returned its answer.
    Completed {
        /// When it returned.
        at: Instant,
    },
    /// Its future was dropped or it panicked.
    Dropped {
        /// When its destructors ran.
        at: Instant,
    },
}

/// How a wait inside a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The test released the label.
    Released,
    /// The token fired first.
    Cancelled,
}

/// The guard held by a handler. Records [`End::Dropped`] if it is dropped before another end is recorded.
#[derive(Debug)]
pub struct Running {
    witness: Witness,
    label: String,
    has_ended: bool,
}

#[derive(Debug, Default)]
struct Log {
    records: BTreeMap<String, HandlerRecord>,
    released: BTreeSet<String>,
}

/// The description of a failed wait, including the log at that time.
struct FailedWait<'a> {
    what: &'a str,
    witness: &'a Witness,
}

// === impl Witness ===

impl Witness {
    /// Creates an empty log.
    pub fn new() -> Self {
        Self {
            log: Arc::new(watch::Sender::new(Log::default())),
        }
    }

    /// Records that a handler has started, and returns the guard that will record its end.
    pub fn begin(&self, label: &str) -> Running {
        self.log.send_modify(|log| log.begin(label));
        Running {
            witness: self.clone(),
            label: label.to_owned(),
            has_ended: false,
        }
    }

    /// Releases the handler with this label, even if it is not waiting yet.
    pub fn release(&self, label: &str) {
        self.log.send_modify(|log| {
            log.released.insert(label.to_owned());
        });
    }

    /// Waits for the handler with this label to start.
    pub async fn started(&self, label: &str) -> Instant {
        let what = format!("{label:?} to start");
        self.wait_for_record(&what, label, |record| Some(record.started))
            .await
    }

    /// Waits for the handler with this label to see its token fire.
    pub async fn token_fired(&self, label: &str) -> Instant {
        let what = format!("the token of {label:?} to fire");
        self.wait_for_record(&what, label, |record| record.token_fired)
            .await
    }

    /// Waits for the handler with this label to end.
    pub async fn ended(&self, label: &str) -> End {
        let what = format!("{label:?} to end");
        self.wait_for_record(&what, label, |record| record.end)
            .await
    }

    /// Waits until exactly `count` handlers are running at the same time.
    pub async fn running_reaches(&self, count: usize) {
        let what = format!("{count} handlers to be running");
        self.until(&what, |log| (log.running() == count).then_some(()))
            .await;
    }

    /// Returns the record for `label`, or `None` if no handler with that label has started.
    pub fn find(&self, label: &str) -> Option<HandlerRecord> {
        self.log.borrow().records.get(label).cloned()
    }

    /// Returns `true` if the handler with this label has started and has not ended yet.
    pub fn is_running(&self, label: &str) -> bool {
        self.find(label).is_some_and(|record| record.end.is_none())
    }

    /// Returns the number of handlers that have started with `label`.
    pub fn starts(&self, label: &str) -> usize {
        self.find(label).map_or(0, |record| record.starts)
    }

    /// Returns the number of running handlers.
    pub fn running(&self) -> usize {
        self.log.borrow().running()
    }

    /// Returns the number of handlers that have stopped because their token fired.
    pub fn cancelled(&self) -> usize {
        self.count(End::is_cancelled)
    }

    /// Returns the number of handlers that have returned an answer.
    pub fn completed(&self) -> usize {
        self.count(End::is_completed)
    }

    /// Returns the number of handlers that have been dropped or have panicked.
    pub fn dropped(&self) -> usize {
        self.count(End::is_dropped)
    }

    fn count(&self, is_counted: impl Fn(&End) -> bool) -> usize {
        let log = self.log.borrow();
        let ends = log.records.values().filter_map(|record| record.end);
        ends.filter(is_counted).count()
    }

    /// Waits until `pick` returns a value for the record with this label.
    async fn wait_for_record<T>(
        &self,
        what: &str,
        label: &str,
        pick: impl Fn(&HandlerRecord) -> Option<T>,
    ) -> T {
        self.until(what, |log| log.records.get(label).and_then(&pick))
            .await
    }

    /// Waits until `pick` returns a value, or panics with `what` and the log.
    ///
    /// It uses the limit of [`within`].
    async fn until<T>(&self, what: &str, pick: impl Fn(&Log) -> Option<T>) -> T {
        let witness = self;
        within(FailedWait { what, witness }, self.wait_for(pick)).await
    }

    /// Waits until `pick` returns a value, however long that takes.
    async fn wait_for<T>(&self, pick: impl Fn(&Log) -> Option<T>) -> T {
        let mut changes = self.log.subscribe();
        loop {
            let found = pick(&changes.borrow_and_update());
            match found {
                Some(found) => return found,
                None => changes.changed().await.expect("the sender is alive"),
            }
        }
    }
}

impl Default for Witness {
    fn default() -> Self {
        Self::new()
    }
}

// === impl End ===

impl End {
    /// Returns when the handler ended.
    pub fn at(&self) -> Instant {
        match *self {
            Self::Cancelled { at } | Self::Completed { at } | Self::Dropped { at } => at,
        }
    }

    /// Returns `true` if the handler stopped because its token fired.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Cancelled { .. })
    }

    /// Returns `true` if the handler returned its answer.
    pub fn is_completed(&self) -> bool {
        matches!(self, Self::Completed { .. })
    }

    /// Returns `true` if the handler was dropped or panicked.
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::Dropped { .. })
    }
}

// === impl Running ===

impl Running {
    /// Waits for the release or for `cancelled`, which wins if both are ready.
    pub async fn held(&self, cancelled: impl Future<Output = ()>) -> Held {
        tokio::select! {
            biased;
            () = cancelled => {
                self.record_token_fired();
                Held::Cancelled
            }
            () = self.released() => Held::Released,
        }
    }

    /// Waits only for the release, but records when `cancelled` completes.
    pub async fn held_regardless(&self, cancelled: impl Future<Output = ()>) {
        if self.held(cancelled).await == Held::Cancelled {
            self.released().await;
        }
    }

    /// Records that the handler is returning its answer.
    pub fn complete(self) {
        self.end(End::Completed { at: Instant::now() });
    }

    /// Records that the handler is stopping because its token fired.
    pub fn cancel(self) {
        self.end(End::Cancelled { at: Instant::now() });
    }

    /// Waits for the release, without a limit because the test's own waits have one.
    async fn released(&self) {
        let picked = |log: &Log| log.released.contains(&self.label).then_some(());
        self.witness.wait_for(picked).await;
    }

    fn record_token_fired(&self) {
        let at = Instant::now();
        self.update(|record| record.token_fired = Some(at));
    }

    fn end(mut self, end: End) {
        self.has_ended = true;
        self.update(|record| record.end = Some(end));
    }

    fn update(&self, change: impl FnOnce(&mut HandlerRecord)) {
        self.witness.log.send_modify(|log| {
            log.records.get_mut(&self.label).map(change);
        });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended {
            let end = End::Dropped { at: Instant::now() };
            self.update(|record| record.end = Some(end));
        }
    }
}

// === impl Log ===

impl Log {
    fn begin(&mut self, label: &str) {
        let starts = self.records.get(label).map_or(0, |record| record.starts);
        let record = HandlerRecord {
            starts: starts + 1,
            started: Instant::now(),
            token_fired: None,
            end: None,
        };
        self.records.insert(label.to_owned(), record);
    }

    fn running(&self) -> usize {
        let records = self.records.values();
        records.filter(|record| record.end.is_none()).count()
    }
}

// === impl FailedWait ===

impl fmt::Display for FailedWait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let log = self.witness.log.borrow();
        write!(f, "{}; the log: {:#?}", self.what, &*log)
    }
}
