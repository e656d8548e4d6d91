//! The departure of an instance: its sessions are handed over one by one, as their calls end.
//!
//! | stage | a peer's new call | everything else |
//! |---|---|---|
//! | here | is served | is served |
//! | handing over | waits until no call of its session is in flight; then the session is given up, and the peer claims it | is served until the session is given up |
//! | gone | the peer is told to claim | the peer is told to claim |
//! | closed | nobody listens | nobody listens |
//!
//! 1. A stage is followed by the next only.
//! 2. A session is given up by its [`DrainGate`] being closed, when no request has entered it and no call of it is in flight.
//!    So nothing is begun in a session that a peer was told to claim.
//! 3. Until somebody asks for it, a session stays where it is: a client who is late for an answer still finds it here.
//! 4. Whoever is told to claim a session looks for its answers in the directory. They are there by then.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mcp_cancel_on_disconnect::Calls;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};
use tracing::info;

use crate::{
    answers::Answers, arrivals::Arrivals, drain_gate::DrainGate, ids::SessionHash,
    sessions::Sessions,
};

/// For how long at least sessions are handed over: 1 s. As long may a request be on its way on a connection that was open when
/// the public listener closed, and a client for an answer that it has not read.
const LINGER: Duration = Duration::from_secs(1);

/// How long at most a peer that is to claim a session waits for the answers of ended calls: 2 s. As long waits an instance at the end of
/// its departure for those of the calls that it has cancelled, and for the tombstones of the sessions that have ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// How far a departure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Here,
    HandingOver,
    Gone,
    Closed,
}

/// How an instance goes.
pub(crate) struct Departure {
    stage: watch::Sender<Stage>,
    /// Whether it has begun, for those who ask with every call.
    has_begun: AtomicBool,
    sessions: Arc<Sessions>,
    arrivals: Arrivals,
    answers: Arc<Answers>,
    /// Of all layers.
    calls: Mutex<Vec<Calls>>,
    /// What peers were told to claim.
    given_up: Mutex<HashSet<SessionHash>>,
}

/// An instance that leaves has left when this is dropped.
pub(crate) struct Leaving<'a>(&'a Departure);

// === impl Departure ===

impl Departure {
    pub(crate) fn new(sessions: Arc<Sessions>, arrivals: Arrivals, answers: Arc<Answers>) -> Self {
        Self {
            stage: watch::Sender::new(Stage::Here),
            has_begun: AtomicBool::new(false),
            sessions,
            arrivals,
            answers,
            calls: Mutex::default(),
            given_up: Mutex::default(),
        }
    }

    /// Has the calls of a layer end before the instance is gone.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    pub(crate) fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Follows the stage.
    pub(crate) fn follow(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// A call has ended, or nothing brings a session any more.
    pub(crate) fn ended(&self, session: Option<&str>) {
        if self.has_begun.load(Ordering::Acquire)
            && let Some(gate) = session.and_then(|id| self.sessions.gate(id))
        {
            gate.changed();
        }
    }

    /// Whether a session was given up here, and is for whoever asks for it next.
    pub(crate) fn has_given_up(&self, id: &str) -> bool {
        // In the order in which it is given up.
        let is_closed = self.sessions.gate(id).is_some_and(|gate| gate.is_closed());
        is_closed
            || self.stage() >= Stage::Gone
            || lock(&self.given_up).contains(&SessionHash::of(id))
    }

    /// A session is this instance's again: what was to be claimed of it was claimed.
    pub(crate) fn has_back(&self, session: SessionHash) {
        if self.has_begun.load(Ordering::Acquire) {
            lock(&self.given_up).remove(&session);
        }
    }

    /// Returns when no call of a session is in flight.
    pub(crate) async fn until_idle(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.until_idle(|| self.is_idle(id)).await;
        }
    }

    /// Waits until no call of a session is in flight, and gives it up.
    pub(crate) async fn hand_over(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.close_when_idle(|| self.is_idle(id)).await;
            self.give_up(SessionHash::of(id));
        }
    }

    /// Waits until the answers are in the directory that the next owner of a session may look for there, for [`FLUSH_TIMEOUT`]
    /// at most. Returns whether they are, or the departure is over.
    pub(crate) async fn settles(&self) -> bool {
        if self.stage() == Stage::Here {
            return true;
        }
        let until = Instant::now() + FLUSH_TIMEOUT;
        self.answers.flush(Some(until)).await || self.stage() >= Stage::Gone
    }

    /// Gives a session up if no call of it is in flight.
    pub(crate) fn try_hand_over(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id)
            && gate.close_if_idle(|| self.is_idle(id))
        {
            self.give_up(SessionHash::of(id));
        }
    }

    /// What becomes of a session whose gate is closed.
    fn give_up(&self, session: SessionHash) {
        // Of one that is gone the last calls are cancelled.
        if self.stage() == Stage::HandingOver {
            // What it has not given to the directory is gone when it is closed.
            self.answers.keep_ended();
            lock(&self.given_up).insert(session);
            self.sessions.relinquish(session);
        }
    }

    /// Whether no call of a session is in flight, beside the requests that have entered its gate.
    fn is_idle(&self, id: &str) -> bool {
        let calls = lock(&self.calls).clone();
        calls.iter().all(|calls| calls.in_session(id) == 0)
            && !self.arrivals.has(SessionHash::of(id))
    }

    pub(crate) fn begin(&self) -> Leaving<'_> {
        self.answers.keep_all();
        self.has_begun.store(true, Ordering::Release);
        self.advance(Stage::HandingOver);
        info!(target: "mcp_cancel_cluster", "this instance hands its sessions over");
        Leaving(self)
    }

    fn advance(&self, stage: Stage) {
        self.stage.send_if_modified(|is| {
            let advances = *is < stage;
            *is = stage.max(*is);
            advances
        });
    }

    fn gates(&self) -> Vec<(Arc<str>, Arc<DrainGate>)> {
        let ids = self.sessions.ids().into_iter();
        let gates = ids.filter_map(|id| self.sessions.gate(&id).map(|gate| (id, gate)));
        gates.filter(|(_, gate)| !gate.is_closed()).collect()
    }
}

impl fmt::Debug for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Departure")
            .field("stage", &self.stage())
            .finish_non_exhaustive()
    }
}

// === impl Leaving ===

impl Leaving<'_> {
    /// Returns when no call of any session is in flight, no session takes any more, and all answers are in the directory; or when it is
    /// time.
    pub(crate) async fn hands_over(&self, limit: Duration, until: Option<Instant>) {
        let all = async {
            sleep(LINGER.min(limit)).await;
            loop {
                let gates = self.0.gates();
                if gates.is_empty() {
                    return;
                }
                for (id, gate) in &gates {
                    gate.until_idle(|| self.0.is_idle(id)).await;
                }
                for (id, gate) in &gates {
                    gate.close_if_idle(|| self.0.is_idle(id));
                }
            }
        };
        match until {
            // What is not over by then is cancelled.
            Some(until) => drop(timeout_at(until, all).await),
            None => all.await,
        }
        self.0.answers.flush(until).await;
    }

    /// Nothing is begun here any more.
    pub(crate) fn is_gone(&self) {
        self.0.advance(Stage::Gone);
        self.0.sessions.close_gates();
    }

    /// Waits for the calls that are left, and cancels the rest when it is time. Returns how many those were.
    pub(crate) async fn drains(&self, until: Option<Instant>) -> usize {
        let mut cancelled = 0;
        let calls = lock(&self.0.calls).clone();
        for calls in calls {
            let left = until.map_or(Duration::MAX, |until| until - Instant::now());
            cancelled += calls.drain(left).await.cancelled;
        }
        // Answers of calls that have ended since. Those that were cancelled at the limit have theirs after it.
        let at_least = Instant::now() + FLUSH_TIMEOUT;
        let until = until.map(|until| until.max(at_least));
        self.0.answers.flush(until).await;
        let deleted = self.0.sessions.until_all_removed();
        match until {
            Some(until) => drop(timeout_at(until, deleted).await),
            None => deleted.await,
        }
        cancelled
    }

    /// Closes the listener for peers, and returns when that is done.
    pub(crate) async fn closes(self) {
        let departure = self.0;
        drop(self);
        departure.stage.closed().await;
        info!(target: "mcp_cancel_cluster", "this instance has left");
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.is_gone();
        self.0.advance(Stage::Closed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
