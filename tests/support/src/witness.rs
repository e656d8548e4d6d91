//! Records what happened to every tool handler. Handlers write to it and tests await it.
//!
//! Contract:
//! 1. Each label belongs to one call. A label that starts again gets a new [`HandlerRecord`] with a higher [`HandlerRecord::starts`].
//!    It replaces the record of the former handler, which is no longer counted.
//! 2. A wait also sees earlier records, so no wait can miss its event.
//! 3. A release is stored, so it may precede the start of the call.
//! 4. [`End::Completed`] means that the handler returned an answer, not that the answer was delivered.
//! 5. Times are those of tokio's clock, so they can be compared under a paused clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tokio::{sync::watch, time::Instant};

use super::limit::within;

/// The shared log. Clones share one log.
#[derive(Clone, Debug)]
pub struct Witness {
    log: Arc<watch::Sender<Log>>,
}

/// The record of the newest handler with one label.
#[derive(Clone, Debug)]
pub struct HandlerRecord {
    /// Number of handlers that started with this label; 1 unless a call was executed twice.
    pub starts: usize,
    /// When the newest of them started.
    pub started: Instant,
    /// When it saw its token fire, even if it ran on.
    pub token_fired: Option<Instant>,
    /// How it ended; `None` while it runs.
    pub end: Option<End>,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It saw its token fire and stopped.
    Cancelled {
        /// When it stopped.
        at: Instant,
    },
    /// It returned its answer.
    Completed {
        /// When it returned.
        at: Instant,
    },
    /// Its future was dropped, or it panicked.
    Dropped {
        /// When its destructors ran.
        at: Instant,
    },
}

/// The end of a wait inside a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The test released the label.
    Released,
    /// The token fired first.
    Cancelled,
}

/// The guard inside a handler. Records [`End::Dropped`] if it is dropped without another end.
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

/// The description of a failed wait, with the log at that time.
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

    /// Records a start. Returns the guard that records the end. Called by handlers.
    pub fn begin(&self, label: &str) -> Running {
        self.log.send_modify(|log| log.begin(label));
        Running {
            witness: self.clone(),
            label: label.to_owned(),
            has_ended: false,
        }
    }

    /// Releases the held handler of `label`, even before it waits.
    pub fn release(&self, label: &str) {
        self.log.send_modify(|log| {
            log.released.insert(label.to_owned());
        });
    }

    /// Waits until the handler of `label` has started.
    pub async fn started(&self, label: &str) -> Instant {
        let what = format!("{label:?} to start");
        self.wait_for_record(&what, label, |record| Some(record.started))
            .await
    }

    /// Waits until the handler of `label` has seen its token fire.
    pub async fn token_fired(&self, label: &str) -> Instant {
        let what = format!("the token of {label:?}");
        self.wait_for_record(&what, label, |record| record.token_fired)
            .await
    }

    /// Waits until the handler of `label` has ended.
    pub async fn ended(&self, label: &str) -> End {
        let what = format!("{label:?} to end");
        self.wait_for_record(&what, label, |record| record.end)
            .await
    }

    /// Waits until exactly `count` handlers run at the same time.
    pub async fn running_reaches(&self, count: usize) {
        let what = format!("{count} handlers to run");
        self.until(&what, |log| (log.running() == count).then_some(()))
            .await;
    }

    /// Returns the record of `label`, or `None` if no handler with that label started.
    pub fn find(&self, label: &str) -> Option<HandlerRecord> {
        self.log.borrow().records.get(label).cloned()
    }

    /// Returns `true` if the handler of `label` has started and not ended.
    pub fn is_running(&self, label: &str) -> bool {
        self.find(label).is_some_and(|record| record.end.is_none())
    }

    /// Returns the number of handlers that started with `label`.
    pub fn starts(&self, label: &str) -> usize {
        self.find(label).map_or(0, |record| record.starts)
    }

    /// Returns the number of running handlers.
    pub fn running(&self) -> usize {
        self.log.borrow().running()
    }

    /// Returns the number of handlers that stopped because their token fired.
    pub fn cancelled(&self) -> usize {
        self.count(End::is_cancelled)
    }

    /// Returns the number of handlers that returned an answer.
    pub fn completed(&self) -> usize {
        self.count(End::is_completed)
    }

    /// Returns the number of handlers that were dropped or panicked.
    pub fn dropped(&self) -> usize {
        self.count(End::is_dropped)
    }

    fn count(&self, is_counted: impl Fn(&End) -> bool) -> usize {
        let log = self.log.borrow();
        let ends = log.records.values().filter_map(|record| record.end);
        ends.filter(is_counted).count()
    }

    /// Waits until `pick` returns a value for the record of `label`.
    async fn wait_for_record<T>(
        &self,
        what: &str,
        label: &str,
        pick: impl Fn(&HandlerRecord) -> Option<T>,
    ) -> T {
        self.until(what, |log| log.records.get(label).and_then(&pick))
            .await
    }

    /// Waits until `pick` returns a value. Panics with `what` and the log after the limit of [`within`].
    async fn until<T>(&self, what: &str, pick: impl Fn(&Log) -> Option<T>) -> T {
        let witness = self;
        within(FailedWait { what, witness }, self.wait_for(pick)).await
    }

    /// Waits without a limit until `pick` returns a value.
    async fn wait_for<T>(&self, pick: impl Fn(&Log) -> Option<T>) -> T {
        let mut changes = self.log.subscribe();
        loop {
            let found = pick(&changes.borrow_and_update());
            match found {
                Some(found) => return found,
                None => changes.changed().await.expect("self holds the sender"),
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
    /// Waits for the release or for `cancelled`. If both are ready, the token wins.
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

    /// Waits for the release only, and records when `cancelled` completes.
    pub async fn held_regardless(&self, cancelled: impl Future<Output = ()>) {
        if self.held(cancelled).await == Held::Cancelled {
            self.released().await;
        }
    }

    /// Records that the handler returns its answer.
    pub fn complete(self) {
        self.end(End::Completed { at: Instant::now() });
    }

    /// Records that the handler stops because its token fired.
    pub fn cancel(self) {
        self.end(End::Cancelled { at: Instant::now() });
    }

    /// Waits for the release, without a limit. The waits of the test are limited.
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
