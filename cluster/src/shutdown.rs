//! Shuts an instance down, transferring its sessions one by one as their calls end.
//!
//! | stage | a new call relayed by a peer | any other request |
//! |---|---|---|
//! | running | It is served. | It is served. |
//! | transferring | It waits until no call in its session is in flight. Then the session is relinquished, and the peer claims it. | It is served until its session is relinquished. |
//! | stopped | The peer is asked to claim the session. | A peer is asked to claim the session, and a client gets a 503. |
//! | closed | No call can arrive, because the peer listener is closed. | The peer listener is closed. A client still gets a 503. |
//!
//! 1. The stage only ever advances, in this order.
//! 2. Before a session is relinquished, its [`DrainGate`] is closed at a moment when no request is in the gate and none of the session's
//!    calls is in flight. That way, no call can start in a session that a peer has been asked to claim.
//! 3. A session is transferred only when a peer asks for it. Until then, a client reconnecting late for an answer still finds its session
//!    here.
//! 4. The instance stops once none of its sessions has a call in flight and it is not relaying any POST. It waits for relayed POSTs because
//!    their clients may be unable to resume them elsewhere.
//! 5. A session's answers are written before a peer is asked to claim it, because the peer reads them from the directory.

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
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{info, warn};

use crate::{
    answers::Answers,
    ids::SessionHash,
    lock::lock,
    log::log,
    sessions::{
        Sessions,
        drain_gate::{DrainGate, InFlightGuard},
        pending_restores::PendingRestores,
    },
};

/// Minimum time spent on transferring sessions, unless the shutdown's limit is shorter.
///
/// Requests may still arrive on connections that were open when the public listener closed, and clients may still reconnect for unread
/// answers.
const SHUTDOWN_LINGER: Duration = Duration::from_secs(1);

/// How long a peer waits for the answers to ended calls to be written.
///
/// If they have not been written by then, the client is asked to retry. At the end of a shutdown, this is also the minimum time allowed for
/// writing the answers to cancelled calls and the tombstones of ended sessions.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long open peer connections may take to finish at the end of a shutdown.
pub(crate) const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the peer listener may take to close.
const CLOSE_TIMEOUT: Duration = CONNECTION_END_TIMEOUT.saturating_mul(2);

/// Interval between checks of whether sessions are still being restored.
const RESTORE_RECHECK_DELAY: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShutdownStage {
    Running,
    Transferring,
    Stopped,
    Closed,
}

/// An instance's shutdown.
pub(crate) struct Shutdown {
    stage: watch::Sender<ShutdownStage>,
    /// Whether the shutdown has started. Read on every call, without a lock.
    has_started: AtomicBool,
    sessions: Arc<Sessions>,
    pending_restores: PendingRestores,
    answers: Arc<Answers>,
    /// All layers' calls.
    calls: Mutex<Vec<Calls>>,
    /// The POSTs that this instance is relaying. This gate is never closed.
    relays: Arc<DrainGate>,
    /// The sessions that peers have been asked to claim.
    relinquished: Mutex<HashSet<SessionHash>>,
}

/// A shutdown in progress. Dropping it stops the instance and closes its peer listener.
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
            has_started: AtomicBool::new(false),
            sessions,
            pending_restores,
            answers,
            calls: Mutex::default(),
            relays: Arc::default(),
            relinquished: Mutex::default(),
        }
    }

    /// Adds a layer's calls. A session is not relinquished while it has any of them in flight.
    pub(crate) fn add_calls(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// Records that a POST for a remote session is in flight, so that the shutdown waits for it.
    ///
    /// The client may be unable to resume the POST once this instance has shut down. Other methods are ignored, because a GET's stream may
    /// never end, and the client can reopen it.
    pub(crate) fn enter_relay(&self) -> Option<InFlightGuard> {
        self.relays.enter()
    }

    pub(crate) fn stage(&self) -> ShutdownStage {
        *self.stage.borrow()
    }

    /// Returns `true` if the instance has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stage() >= ShutdownStage::Stopped
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<ShutdownStage> {
        self.stage.subscribe()
    }

    /// Called when a call has ended, or a request no longer takes part in a restore.
    ///
    /// Wakes the tasks waiting for its session.
    pub(crate) fn on_call_ended(&self, session: Option<&str>) {
        if self.has_started.load(Ordering::Acquire)
            && let Some(gate) = session.and_then(|id| self.sessions.gate(id))
        {
            gate.notify_changed();
        }
    }

    /// Returns `true` if a session has been relinquished during the shutdown, or is about to be.
    ///
    /// Also returns `true` once the instance has stopped.
    pub(crate) fn has_relinquished(&self, id: &str) -> bool {
        // Check in the order in which a session is relinquished: its gate is closed, the session is recorded, and the gate is removed.
        let is_closed = self.sessions.gate(id).is_some_and(|gate| gate.is_closed());
        is_closed || self.has_stopped() || lock(&self.relinquished).contains(&SessionHash::of(id))
    }

    /// Called when this instance has reclaimed a session.
    pub(crate) fn on_reclaimed(&self, session: SessionHash) {
        if self.has_started.load(Ordering::Acquire) {
            lock(&self.relinquished).remove(&session);
        }
    }

    /// Waits until a session is idle or not local, or its gate is closed.
    pub(crate) async fn wait_until_idle(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.wait_until_idle(|| self.is_idle(id)).await;
        }
    }

    /// Waits until a session is idle, then relinquishes it. Does nothing if it is not local.
    pub(crate) async fn transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.close_when_idle(|| self.is_idle(id)).await;
            self.relinquish(SessionHash::of(id));
        }
    }

    /// Waits for answers to ended calls to be written, for at most [`FLUSH_TIMEOUT`].
    ///
    /// A session's next owner may read them from the directory. Returns `true` if they have been written, if the shutdown has not started,
    /// or if the instance has stopped.
    pub(crate) async fn flush_answers(&self) -> bool {
        if self.stage() == ShutdownStage::Running {
            return true;
        }
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        self.answers.flush(Some(deadline)).await || self.has_stopped()
    }

    /// Relinquishes a session if it has no requests or calls in flight.
    pub(crate) fn try_transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id)
            && gate.close_if_idle(|| self.is_idle(id))
        {
            self.relinquish(SessionHash::of(id));
        }
    }

    /// Relinquishes a session whose gate is closed. Does nothing unless sessions are being transferred.
    pub(crate) fn relinquish(&self, session: SessionHash) {
        // A stopped instance cancels the remaining calls instead.
        if self.stage() == ShutdownStage::Transferring {
            // Answers not queued by the time the session is closed are lost.
            self.answers.enqueue_ended();
            lock(&self.relinquished).insert(session);
            self.sessions.relinquish(session);
        }
    }

    /// Returns `true` if a session has no call in flight and no pending restore.
    ///
    /// This ignores the requests in its gate.
    fn is_idle(&self, id: &str) -> bool {
        let calls = lock(&self.calls).clone();
        calls.iter().all(|calls| calls.in_session(id) == 0)
            && !self.pending_restores.contains(SessionHash::of(id))
    }

    /// Starts the shutdown. From now on, every answer is stored.
    pub(crate) fn begin(&self) -> ShutdownGuard<'_> {
        self.answers.retain_all();
        self.has_started.store(true, Ordering::Release);
        self.advance(ShutdownStage::Transferring);
        log(|| info!(target: "mcp_cancel_cluster", "this instance is transferring its sessions"));
        ShutdownGuard(self)
    }

    fn advance(&self, stage: ShutdownStage) {
        self.stage.send_if_modified(|current| {
            let is_advance = *current < stage;
            *current = stage.max(*current);
            is_advance
        });
    }

    /// Returns `true` if any gate is open, any session is being restored, or any POST is relayed.
    fn is_in_use(&self) -> bool {
        !self.pending_restores.is_empty() || !self.open_gates().is_empty() || !self.relays.is_idle()
    }

    /// Returns the open gates of local sessions.
    fn open_gates(&self) -> Vec<(Arc<str>, Arc<DrainGate>)> {
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
    /// Transfers sessions until none has a call in flight and no POST is being relayed.
    ///
    /// Returns at `until` at the latest. If it returns before then, all gates are closed, and each answer has been written or evicted, or
    /// has expired.
    pub(crate) async fn transfer_sessions(&self, limit: Duration, until: Option<Instant>) {
        let transfer = async {
            sleep(SHUTDOWN_LINGER.min(limit)).await;
            loop {
                self.close_idle_gates().await;
                self.0.answers.flush(until).await;
                // In the meantime, another session may have been restored, or another POST relayed.
                if !self.0.is_in_use() {
                    return;
                }
            }
        };
        match until {
            // Calls that run longer are cancelled.
            Some(until) => drop(timeout_at(until, transfer).await),
            None => transfer.await,
        }
    }

    /// Waits until each open session has been idle, and then until no POST is being relayed.
    ///
    /// Finally, closes the gates of the sessions still idle.
    async fn close_idle_gates(&self) {
        while !self.0.pending_restores.is_empty() {
            sleep(RESTORE_RECHECK_DELAY).await;
        }
        let gates = self.0.open_gates();
        for (id, gate) in &gates {
            gate.wait_until_idle(|| self.0.is_idle(id)).await;
        }
        self.0.relays.wait_until_idle(|| true).await;
        for (id, gate) in &gates {
            gate.close_if_idle(|| self.0.is_idle(id));
        }
    }

    /// Stops serving new requests.
    pub(crate) fn stop_serving(&self) {
        self.0.advance(ShutdownStage::Stopped);
        self.0.sessions.close_gates();
    }

    /// Waits for the remaining calls until `deadline`, then cancels those still in flight.
    ///
    /// Returns the number of calls cancelled.
    pub(crate) async fn drain(&self, deadline: Option<Instant>) -> usize {
        let mut cancelled = 0;
        let calls = lock(&self.0.calls).clone();
        for calls in calls {
            let remaining = deadline.map_or(Duration::MAX, |deadline| deadline - Instant::now());
            cancelled += calls.drain(remaining).await.cancelled;
        }
        // Flush the answers to calls that have ended since then. If calls were cancelled at the deadline, their answers can only be written
        // after it.
        let min_until = Instant::now() + FLUSH_TIMEOUT;
        let until = deadline.map(|deadline| deadline.max(min_until));
        self.0.answers.flush(until).await;
        let deleted = self.0.sessions.wait_until_all_removed();
        match until {
            Some(until) => drop(timeout_at(until, deleted).await),
            None => deleted.await,
        }
        cancelled
    }

    /// Closes the peer listener. Returns once it is closed, or after [`CLOSE_TIMEOUT`].
    pub(crate) async fn close(self) {
        let shutdown = self.0;
        drop(self);
        if timeout(CLOSE_TIMEOUT, shutdown.stage.closed())
            .await
            .is_err()
        {
            log(
                || warn!(target: "mcp_cancel_cluster", "the peer listener is still open: is `serve_peers` no longer being polled?"),
            );
        }
        log(|| info!(target: "mcp_cancel_cluster", "this instance has left the cluster"));
    }
}

impl Drop for ShutdownGuard<'_> {
    fn drop(&mut self) {
        self.stop_serving();
        self.0.advance(ShutdownStage::Closed);
    }
}
