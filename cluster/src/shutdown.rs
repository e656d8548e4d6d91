//! The shutdown of an instance: its sessions are transferred one by one, as their calls end.
//!
//! | stage | a peer's new call | everything else |
//! |---|---|---|
//! | running | is served | is served |
//! | transferring | waits until no call of its session is in flight; then the session is relinquished, and the peer claims it | is served until the session is relinquished |
//! | stopped | the peer is told to claim | the peer is told to claim |
//! | closed | nobody listens | nobody listens |
//!
//! 1. A stage is followed by the next only.
//! 2. A session is relinquished by its [`DrainGate`] being closed, when no request has entered it and no call of it is in flight.
//!    So nothing is begun in a session that a peer was told to claim.
//! 3. Until somebody asks for it, a session stays where it is: a client who is late for an answer still finds it here.
//! 4. Whoever is told to claim a session looks for its answers in the directory. They are there by then.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex,
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
    answers::Answers, drain_gate::DrainGate, ids::SessionHash, lock::lock,
    pending_restores::PendingRestores, sessions::Sessions,
};

/// For how long at least sessions are transferred: 1 s. As long may a request be on its way on a connection that was open when
/// the public listener closed, and a client for an answer that it has not read.
const SHUTDOWN_LINGER: Duration = Duration::from_secs(1);

/// How long at most a peer that is to claim a session waits for the answers of ended calls: 2 s. As long waits an instance at the end of
/// its shutdown for those of the calls that it has cancelled, and for the tombstones of the sessions that have ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// How far a shutdown is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShutdownStage {
    Running,
    Transferring,
    Stopped,
    Closed,
}

/// How an instance shuts down.
pub(crate) struct Shutdown {
    stage: watch::Sender<ShutdownStage>,
    /// Whether it has begun, for those who ask with every call.
    has_begun: AtomicBool,
    sessions: Arc<Sessions>,
    pending_restores: PendingRestores,
    answers: Arc<Answers>,
    /// Of all layers.
    calls: Mutex<Vec<Calls>>,
    /// What peers were told to claim.
    relinquished: Mutex<HashSet<SessionHash>>,
}

/// The shutdown of an instance is over when this is dropped.
pub(crate) struct ShutdownGuard<'a>(&'a Shutdown);

// === impl Shutdown ===

impl Shutdown {
    pub(crate) fn new(
        sessions: Arc<Sessions>,
        pending_restores: PendingRestores,
        answers: Arc<Answers>,
    ) -> Self {
        Self {
            stage: watch::Sender::new(ShutdownStage::Running),
            has_begun: AtomicBool::new(false),
            sessions,
            pending_restores,
            answers,
            calls: Mutex::default(),
            relinquished: Mutex::default(),
        }
    }

    /// Has the calls of a layer end before the instance has stopped.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    pub(crate) fn stage(&self) -> ShutdownStage {
        *self.stage.borrow()
    }

    /// Whether the instance has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stage() >= ShutdownStage::Stopped
    }

    /// Follows the stage.
    pub(crate) fn follow(&self) -> watch::Receiver<ShutdownStage> {
        self.stage.subscribe()
    }

    /// A call has ended, or no request restores a session any more.
    pub(crate) fn on_call_ended(&self, session: Option<&str>) {
        if self.has_begun.load(Ordering::Acquire)
            && let Some(gate) = session.and_then(|id| self.sessions.gate(id))
        {
            gate.changed();
        }
    }

    /// Whether a session was relinquished here, and is for the next instance that asks for it.
    pub(crate) fn has_relinquished(&self, id: &str) -> bool {
        // In the order in which it is relinquished.
        let is_closed = self.sessions.gate(id).is_some_and(|gate| gate.is_closed());
        is_closed || self.has_stopped() || lock(&self.relinquished).contains(&SessionHash::of(id))
    }

    /// A session is this instance's again: what was to be claimed of it was claimed.
    pub(crate) fn on_reclaimed(&self, session: SessionHash) {
        if self.has_begun.load(Ordering::Acquire) {
            lock(&self.relinquished).remove(&session);
        }
    }

    /// Returns when no call of a session is in flight.
    pub(crate) async fn until_idle(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.until_idle(|| self.is_idle(id)).await;
        }
    }

    /// Waits until no call of a session is in flight, and relinquishes it.
    pub(crate) async fn transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.close_when_idle(|| self.is_idle(id)).await;
            self.relinquish(SessionHash::of(id));
        }
    }

    /// Waits until the answers are in the directory that the next owner of a session may look for there, for [`FLUSH_TIMEOUT`]
    /// at most. Returns whether they are, or the instance has stopped.
    pub(crate) async fn flush_answers(&self) -> bool {
        if self.stage() == ShutdownStage::Running {
            return true;
        }
        let until = Instant::now() + FLUSH_TIMEOUT;
        self.answers.flush(Some(until)).await || self.has_stopped()
    }

    /// Relinquishes a session if no call of it is in flight.
    pub(crate) fn try_transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id)
            && gate.close_if_idle(|| self.is_idle(id))
        {
            self.relinquish(SessionHash::of(id));
        }
    }

    /// What becomes of a session whose gate is closed.
    fn relinquish(&self, session: SessionHash) {
        // Of an instance that has stopped the last calls are cancelled.
        if self.stage() == ShutdownStage::Transferring {
            // What it has not given to the directory is gone when it is closed.
            self.answers.enqueue_ended();
            lock(&self.relinquished).insert(session);
            self.sessions.relinquish(session);
        }
    }

    /// Whether no call of a session is in flight, beside the requests that have entered its gate.
    fn is_idle(&self, id: &str) -> bool {
        let calls = lock(&self.calls).clone();
        calls.iter().all(|calls| calls.in_session(id) == 0)
            && !self.pending_restores.contains(SessionHash::of(id))
    }

    pub(crate) fn begin(&self) -> ShutdownGuard<'_> {
        self.answers.retain_all();
        self.has_begun.store(true, Ordering::Release);
        self.advance(ShutdownStage::Transferring);
        info!(target: "mcp_cancel_cluster", "this instance hands its sessions over");
        ShutdownGuard(self)
    }

    fn advance(&self, stage: ShutdownStage) {
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

impl fmt::Debug for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shutdown")
            .field("stage", &self.stage())
            .finish_non_exhaustive()
    }
}

// === impl ShutdownGuard ===

impl ShutdownGuard<'_> {
    /// Returns when no call of any session is in flight, no session takes any more, and all answers are in the directory; or when it is
    /// time.
    pub(crate) async fn transfer_sessions(&self, limit: Duration, until: Option<Instant>) {
        let all = async {
            sleep(SHUTDOWN_LINGER.min(limit)).await;
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
    pub(crate) fn stop_serving(&self) {
        self.0.advance(ShutdownStage::Stopped);
        self.0.sessions.close_gates();
    }

    /// Waits for the calls that are left, and cancels the rest when it is time. Returns how many those were.
    pub(crate) async fn drain(&self, until: Option<Instant>) -> usize {
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
    pub(crate) async fn close(self) {
        let shutdown = self.0;
        drop(self);
        shutdown.stage.closed().await;
        info!(target: "mcp_cancel_cluster", "this instance has left");
    }
}

impl Drop for ShutdownGuard<'_> {
    fn drop(&mut self) {
        self.stop_serving();
        self.0.advance(ShutdownStage::Closed);
    }
}
