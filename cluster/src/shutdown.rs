//! The shutdown of an instance, which transfers its sessions one by one as their calls end.
//!
//! | stage | a peer's new call | everything else |
//! |---|---|---|
//! | running | is served | is served |
//! | transferring | waits until no call of its session is in flight; then the session is relinquished, and the peer claims it | is served until the session is relinquished |
//! | stopped | the peer is asked to claim the session | a peer is asked to claim the session, and a client gets 503 |
//! | closed | the peer listener is closed | the same, except that the peer listener is closed |
//!
//! 1. The stage only advances, in this order.
//! 2. A session is relinquished by closing its [`DrainGate`] while no request is in the gate, and no call of the session is in flight.
//!    Therefore no call starts in a session that a peer was asked to claim.
//! 3. A session is transferred only on a peer's request. Until then a client that returns late for an answer still finds the session here.
//! 4. The instance stops once no call of its sessions and no POST that it relays is in flight. A client may be unable to resume such a POST
//!    elsewhere.
//! 5. The answers of a session are written before a peer is asked to claim it, because the peer reads them from the directory.

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

/// Minimum duration of the transfer of sessions, unless the shutdown's limit is shorter: 1 s.
///
/// Chosen because a request may still arrive on a connection that was open when the public listener closed. A client may also still return
/// for an answer that it has not read.
const SHUTDOWN_LINGER: Duration = Duration::from_secs(1);

/// Maximum time a peer waits until the answers to ended calls are written: 2 s.
///
/// After that, the client is asked to retry.
///
/// At the end of a shutdown, it is the minimum time allowed for writing the answers to cancelled calls and the tombstones of ended sessions.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time for open peer connections to complete at the end: 5 s.
pub(crate) const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time until the peer listener is closed: 10 s.
const CLOSE_TIMEOUT: Duration = CONNECTION_END_TIMEOUT.saturating_mul(2);

/// Delay between checks for sessions that are still being restored: 50 ms.
const RESTORE_RECHECK_DELAY: Duration = Duration::from_millis(50);

/// The stage of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShutdownStage {
    Running,
    Transferring,
    Stopped,
    Closed,
}

/// The shutdown of an instance.
pub(crate) struct Shutdown {
    stage: watch::Sender<ShutdownStage>,
    /// Whether the shutdown has started. Read on every call, without a lock.
    has_started: AtomicBool,
    sessions: Arc<Sessions>,
    pending_restores: PendingRestores,
    answers: Arc<Answers>,
    /// The calls of all layers.
    calls: Mutex<Vec<Calls>>,
    /// The POSTs that this instance relays. The gate stays open.
    relays: Arc<DrainGate>,
    /// The sessions that peers were asked to claim.
    relinquished: Mutex<HashSet<SessionHash>>,
}

/// A shutdown that has started. Dropping it stops the instance and closes its peer listener.
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

    /// Adds the calls of a layer. A session with such calls in flight is not relinquished.
    pub(crate) fn add_calls(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// Records that a POST of a remote session is in flight. A shutdown waits for it.
    ///
    /// A client may be unable to resume the POST once this instance has ended. Other methods do not count, because the stream of a GET need
    /// not end and can be opened again.
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

    /// Subscribes to the stage.
    pub(crate) fn subscribe(&self) -> watch::Receiver<ShutdownStage> {
        self.stage.subscribe()
    }

    /// Called when a call has ended, or a request no longer takes part in a restore. Wakes the tasks that wait for its session.
    pub(crate) fn on_call_ended(&self, session: Option<&str>) {
        if self.has_started.load(Ordering::Acquire)
            && let Some(gate) = session.and_then(|id| self.sessions.gate(id))
        {
            gate.notify_changed();
        }
    }

    /// Returns `true` if a session was relinquished here during the shutdown or is about to be, or the instance has stopped.
    pub(crate) fn has_relinquished(&self, id: &str) -> bool {
        // Checked in the order in which a session is relinquished: its gate is closed, the session is recorded, and the gate is removed.
        let is_closed = self.sessions.gate(id).is_some_and(|gate| gate.is_closed());
        is_closed || self.has_stopped() || lock(&self.relinquished).contains(&SessionHash::of(id))
    }

    /// Called when this instance has claimed a session again.
    pub(crate) fn on_reclaimed(&self, session: SessionHash) {
        if self.has_started.load(Ordering::Acquire) {
            lock(&self.relinquished).remove(&session);
        }
    }

    /// Returns when a session is idle or not local, or its gate is closed.
    pub(crate) async fn until_idle(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.until_idle(|| self.is_idle(id)).await;
        }
    }

    /// Waits until a session is idle, and relinquishes it. Does nothing if the session is not local.
    pub(crate) async fn transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id) {
            gate.close_when_idle(|| self.is_idle(id)).await;
            self.relinquish(SessionHash::of(id));
        }
    }

    /// Waits until answers to ended calls are in the directory, for at most [`FLUSH_TIMEOUT`].
    ///
    /// The next owner of a session may read them there. Returns `true` if they have been written, the shutdown has not started, or the
    /// instance has stopped.
    pub(crate) async fn flush_answers(&self) -> bool {
        if self.stage() == ShutdownStage::Running {
            return true;
        }
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        self.answers.flush(Some(deadline)).await || self.has_stopped()
    }

    /// Relinquishes a session if no request or call of it is in flight.
    pub(crate) fn try_transfer(&self, id: &str) {
        if let Some(gate) = self.sessions.gate(id)
            && gate.close_if_idle(|| self.is_idle(id))
        {
            self.relinquish(SessionHash::of(id));
        }
    }

    /// Relinquishes a session whose gate is closed. Does nothing unless sessions are being transferred.
    pub(crate) fn relinquish(&self, session: SessionHash) {
        // An instance that has stopped cancels the last calls instead.
        if self.stage() == ShutdownStage::Transferring {
            // Answers that are not queued before the session is closed are lost.
            self.answers.enqueue_ended();
            lock(&self.relinquished).insert(session);
            self.sessions.relinquish(session);
        }
    }

    /// Returns `true` if a session has no call in flight and no pending restore. Ignores the requests in its gate.
    fn is_idle(&self, id: &str) -> bool {
        let calls = lock(&self.calls).clone();
        calls.iter().all(|calls| calls.in_session(id) == 0)
            && !self.pending_restores.contains(SessionHash::of(id))
    }

    /// Starts the shutdown. From now on, every answer is kept.
    pub(crate) fn begin(&self) -> ShutdownGuard<'_> {
        self.answers.retain_all();
        self.has_started.store(true, Ordering::Release);
        self.advance(ShutdownStage::Transferring);
        log(|| info!(target: "mcp_cancel_cluster", "this instance transfers its sessions"));
        ShutdownGuard(self)
    }

    fn advance(&self, stage: ShutdownStage) {
        self.stage.send_if_modified(|current| {
            let is_advance = *current < stage;
            *current = stage.max(*current);
            is_advance
        });
    }

    /// Returns `true` if a gate is open, a session is being restored, or a POST is being relayed.
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
    /// Returns at the time `until` at the latest. When it returns earlier, all gates are closed, and each answer has been
    /// written or evicted or has expired.
    pub(crate) async fn transfer_sessions(&self, limit: Duration, until: Option<Instant>) {
        let transfer = async {
            sleep(SHUTDOWN_LINGER.min(limit)).await;
            loop {
                self.close_idle_gates().await;
                self.0.answers.flush(until).await;
                // Another session may have been restored in the meantime, or another POST relayed.
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

    /// Waits until each open session has been idle, then until no POST is being relayed. Closes the gates of sessions that are still idle.
    async fn close_idle_gates(&self) {
        while !self.0.pending_restores.is_empty() {
            sleep(RESTORE_RECHECK_DELAY).await;
        }
        let gates = self.0.open_gates();
        for (id, gate) in &gates {
            gate.until_idle(|| self.0.is_idle(id)).await;
        }
        self.0.relays.until_idle(|| true).await;
        for (id, gate) in &gates {
            gate.close_if_idle(|| self.0.is_idle(id));
        }
    }

    /// Stops serving new requests.
    pub(crate) fn stop_serving(&self) {
        self.0.advance(ShutdownStage::Stopped);
        self.0.sessions.close_gates();
    }

    /// Waits for the remaining calls until `deadline`, and cancels the rest. Returns the number of cancelled calls.
    pub(crate) async fn drain(&self, deadline: Option<Instant>) -> usize {
        let mut cancelled = 0;
        let calls = lock(&self.0.calls).clone();
        for calls in calls {
            let remaining = deadline.map_or(Duration::MAX, |deadline| deadline - Instant::now());
            cancelled += calls.drain(remaining).await.cancelled;
        }
        // Flushes the answers to calls that have ended since. Those of calls cancelled at the limit are written after the limit.
        let min_until = Instant::now() + FLUSH_TIMEOUT;
        let until = deadline.map(|deadline| deadline.max(min_until));
        self.0.answers.flush(until).await;
        let deleted = self.0.sessions.until_all_removed();
        match until {
            Some(until) => drop(timeout_at(until, deleted).await),
            None => deleted.await,
        }
        cancelled
    }

    /// Closes the peer listener. Returns when it is closed, or after [`CLOSE_TIMEOUT`].
    pub(crate) async fn close(self) {
        let shutdown = self.0;
        drop(self);
        if timeout(CLOSE_TIMEOUT, shutdown.stage.closed())
            .await
            .is_err()
        {
            log(
                || warn!(target: "mcp_cancel_cluster", "the peer listener is still open: is `serve_peers` no longer polled?"),
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
