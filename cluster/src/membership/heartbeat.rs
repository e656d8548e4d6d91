//! Renews the lease, writes local sessions, and tracks whether the directory is consistent.
//!
//! 1. A single task renews the lease, and registers and deletes sessions. It writes the sessions in several concurrent batches, which
//!    heartbeats do not wait for. Writes to the same session can complete in any order, because the records themselves are ordered
//!    ([`Record`](crate::ids::Record)).
//! 2. The task sends a heartbeat every [`HEARTBEAT_INTERVAL`], even while many sessions are waiting to be written. The interval drops to
//!    [`RETRY_INTERVAL`] while the directory is not answering, and to [`MIN_INTERVAL`] while clients are being turned away.
//! 3. Data may have been lost if the backend is in a new run or if the lease has lapsed. In either case, the directory stops being
//!    consistent before the lease is reacquired. An instance that reads its own lease and then finds the directory consistent therefore
//!    knows that nothing was lost in between.
//!
//! Each heartbeat reports, among other things ([`Status`]):
//!
//! - `written_in`: the run of the backend in which this instance has written all of its sessions
//! - `is_settled`: whether it has found the directory consistent for [`SETTLE_PERIOD`]
//! - `has_late_answers`: whether answers to its calls are late, or calls may still be running in sessions it must close
//! - `turned_away`: how long ago it last turned a client away
//!
//! A missing record proves that the session does not exist only if [`Heartbeat::proves_absence`] returns `true`.

use std::{
    convert::Infallible,
    fmt::{self, Debug, Formatter},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    select,
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

#[cfg(test)]
pub(crate) use self::health::MIN_LEASE;
use self::{health::DirectoryHealth, lane::Lane};
pub(crate) use self::{
    health::{MAX_BACKWARD_CLOCK_STEP, SETTLE_PERIOD},
    stalls::MAX_UNREPORTED_STALL,
};
use crate::{
    answers::Answers,
    directory::{
        BackendRunId, DIRECTORY_TIMEOUT, Directory, DirectoryError, HeartbeatReply, Limited, Status,
    },
    ids::{Owner, SessionHash},
    lock::lock,
    log::log,
    membership::turned_away::TurnedAway,
    metrics,
    rate_limited_warning::RateLimitedWarning,
    sessions::{Sessions, Work},
};

mod contests;
mod health;
mod lane;
mod proofs;
mod stalls;

/// How often heartbeats are sent. The lease survives the loss of two in a row.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// How often heartbeats are attempted while the directory is not answering.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum interval between heartbeats, which applies while clients are being turned away.
///
/// This bounds the load on the directory: even a hundred instances turning clients away send at most 400 heartbeats a second.
const MIN_INTERVAL: Duration = Duration::from_millis(250);

/// How often to scan for sessions whose records are due to be rewritten.
const REFRESH_SCAN_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of session batches written concurrently.
///
/// Enough to register 3,000 sessions a second even if the directory has a latency of 300 ms.
const MAX_WRITES: usize = 8;

/// Maximum number of deletion batches written concurrently.
const MAX_DELETIONS: usize = 4;

/// Renews the lease and writes the local sessions.
pub(crate) struct Heartbeat {
    /// This instance.
    owner: Owner,
    directory: Limited,
    sessions: Arc<Sessions>,
    turned_away: Arc<TurnedAway>,
    answers: Arc<Answers>,
    health: Mutex<DirectoryHealth>,
    /// The number of the next status.
    next_number: AtomicU64,
    unreachable_warning: RateLimitedWarning,
    unwritten_warning: RateLimitedWarning,
    stop: Notify,
    /// Makes the task send a heartbeat right away.
    heartbeat_due: Notify,
    /// Notified after each answered heartbeat, so that writes can resume after an outage.
    directory_reachable: Notify,
}

// === impl Heartbeat ===

impl Heartbeat {
    pub(crate) fn new(
        owner: Owner,
        directory: Limited,
        sessions: Arc<Sessions>,
        turned_away: Arc<TurnedAway>,
        answers: Arc<Answers>,
        requires_lease: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            owner,
            directory,
            sessions,
            turned_away,
            answers,
            health: Mutex::new(DirectoryHealth::new(requires_lease)),
            next_number: AtomicU64::new(1),
            unreachable_warning: RateLimitedWarning::default(),
            unwritten_warning: RateLimitedWarning::default(),
            stop: Notify::new(),
            heartbeat_due: Notify::new(),
            directory_reachable: Notify::new(),
        })
    }

    /// Returns when the directory became consistent, or `None` if it is not.
    pub(crate) fn consistent_since(&self) -> Option<Instant> {
        self.health().consistent_since(Instant::now())
    }

    /// Returns `true` if a session open here may serve new requests.
    ///
    /// If not, another instance may have claimed the session, so the session must be verified first ([`Lapse`](crate::sessions::Lapse)).
    pub(crate) fn may_serve(&self, id: &str) -> bool {
        let lapse = self.health().lapse(Instant::now());
        if lapse.is_none() && !self.sessions.has_contested() {
            return true;
        }
        self.sessions.is_verified(SessionHash::of(id), lapse)
    }

    /// Waits until a session open here may serve new requests or has been closed.
    pub(crate) async fn wait_until_decided(&self, id: &str) {
        let session = SessionHash::of(id);
        let is_decided = || self.may_serve(id) || !self.sessions.is_local(session);
        self.sessions.wait_until(is_decided).await;
        self.sessions.relinquished.wait_until_closed(session).await;
    }

    /// Sends heartbeats and writes sessions until [`stop`](Self::stop). Must be called only once.
    ///
    /// Once stopped, it writes whatever is still queued, sends a final status and releases the lease. If the directory does not accept
    /// these requests, the lease expires on its own.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease lapses and nothing more is written.
    pub(crate) async fn run(self: Arc<Self>) {
        select! {
            biased;
            // Poll this before the heartbeats, so that the first heartbeat after a stall reports it.
            never = stalls::watch(&self.turned_away) => match never {},
            () = self.send_heartbeats() => {}
            never = self.run_writes() => match never {},
            never = self.run_contested() => match never {},
        }
        // Write the most recently opened sessions, so that other instances can claim them.
        let _ = timeout(DIRECTORY_TIMEOUT, self.write_all()).await;
        // This final status reports when this instance last turned a client away. If it cannot be sent, the lease expires instead, which
        // counts as turning a client away.
        let reported = self.directory.heartbeat(self.owner, &self.status()).await;
        self.health().on_heartbeat_failed();
        metrics::set_directory_consistent(false);
        if reported.is_err() || self.directory.release_lease(self.owner).await.is_err() {
            log(|| tracing::debug!("could not release the lease, so it will expire on its own"));
        }
    }

    /// Stops [`run`](Self::run), which then releases the lease.
    ///
    /// Other instances can then claim the sessions without delay.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }

    async fn send_heartbeats(&self) {
        let mut refresh = Instant::now() + REFRESH_SCAN_INTERVAL;
        loop {
            let started = Instant::now();
            self.send_heartbeat(started).await;
            if started >= refresh {
                self.sessions.refresh();
                refresh = started + REFRESH_SCAN_INTERVAL;
            }
            let is_unreachable = self.health().is_unreachable();
            if !is_unreachable {
                self.directory_reachable.notify_one();
            }
            self.sessions.notify_changed();
            metrics::set_directory_consistent(self.consistent_since().is_some());
            let interval = if is_unreachable {
                RETRY_INTERVAL
            } else {
                HEARTBEAT_INTERVAL
            };
            let next = started + interval;
            select! {
                biased;
                () = self.stop.notified() => return,
                () = sleep_until(next) => {}
                () = self.heartbeat_due.notified() => {}
                () = self.wait_until_turned_away(started + MIN_INTERVAL) => {}
            }
        }
    }

    /// Waits until there is a turned-away client to report, but at least until `earliest`.
    async fn wait_until_turned_away(&self, earliest: Instant) {
        self.turned_away.wait_until_unreported().await;
        sleep_until(earliest).await;
    }

    async fn send_heartbeat(&self, started: Instant) {
        if let Err(error) = self.try_send_heartbeat(started).await {
            self.health().on_heartbeat_failed();
            let consequence = "Until the directory accepts heartbeats again, this instance does not start or claim sessions, and does not cancel orphaned calls";
            self.unreachable_warning.warn(&format_args!(
                "directory heartbeat failed: {error}. {consequence}"
            ));
        }
    }

    async fn try_send_heartbeat(&self, mut started: Instant) -> Result<(), DirectoryError> {
        self.health().on_heartbeat_started(started);
        let status = self.status();
        let is_recent = |elapsed: &Duration| *elapsed < HEARTBEAT_INTERVAL;
        if let Some(elapsed) = status.turned_away.filter(is_recent) {
            log(
                || tracing::debug!(target: "mcp_cancel_cluster::turned_away", ?elapsed, "a client was turned away recently"),
            );
        }
        let mut reply = self.report(started, &status).await?;
        if status
            .created_at
            .is_some_and(|at| reply.time.since(at) > health::MAX_HEARTBEAT_AGE)
        {
            // The directory's clock has stepped, or this machine was suspended. Either way, the lease has been renewed as of too early a
            // time, so renew it again.
            started = Instant::now();
            reply = self.report(started, &self.status()).await?;
        }
        if !reply.was_alive {
            self.health().on_lease_missing();
            let mut status = self.status();
            // A new instance has no sessions, so it has no reason to delay other instances' proofs.
            status.written_in = (self.sessions.len() == 0).then(|| reply.run.clone());
            self.directory.acquire_lease(self.owner, &status).await?;
        }
        let renews_epochs = self.may_renew_epochs(&reply.run).await?;
        let required = self.health().on_heartbeat_answered(started, reply.run);
        if required.may_have_lost_data {
            self.answers.write_again();
        }
        if renews_epochs {
            self.health().on_epochs_renewed();
            self.sessions.renew_all();
        } else if required.write_all {
            self.sessions.write_all_again();
        }
        Ok(())
    }

    /// Sends a status and reads the directory's clock from the reply.
    ///
    /// If that clock has stepped forward or this machine was suspended, clients are recorded as turned away. If one of this instance's
    /// records has been replaced, its sessions are rechecked.
    async fn report(
        &self,
        started: Instant,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        let reply = self.directory.heartbeat(self.owner, status).await?;
        let now = Instant::now();
        if self.health().on_time_read(started, now, reply.time) {
            self.turned_away.record();
        }
        if reply.was_replaced {
            self.sessions.check_all();
        }
        Ok(reply)
    }

    /// Returns `true` if new epochs are due and this instance may take them.
    ///
    /// As long as another instance's claim may have been lost, new epochs have to wait, because they would supersede that claim. In the
    /// meantime, no instance claims sessions.
    async fn may_renew_epochs(&self, run: &BackendRunId) -> Result<bool, DirectoryError> {
        match self.health().renewal_due() {
            None => return Ok(false),
            Some(before) if before == run => return Ok(true),
            Some(_) => {}
        }
        let leases = self.directory.leases().await?;
        let is_settled = self.health().is_settled(Instant::now()) || leases.has_settled();
        Ok(is_settled && leases.all_have_written(self.owner.incarnation))
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let (written_in, is_settled, created_at) = {
            let health = self.health();
            let written_in = health.written_in(now).cloned();
            (
                written_in,
                health.is_settled(now),
                health.directory_time(now),
            )
        };
        Status {
            written_in,
            is_settled,
            // Read after `written_in`, because a session claimed by another instance becomes contested before it is confirmed.
            has_late_answers: self.has_late_answers(),
            turned_away: self.turned_away.age(now),
            created_at,
            number: self.next_number.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Writes queued sessions and deletions, forever.
    async fn run_writes(&self) -> Infallible {
        let mut entries = Lane::new(MAX_WRITES, RETRY_INTERVAL);
        // Deletions have their own lane, so that slow or failing deletions do not delay session writes.
        let mut deletions = Lane::new(MAX_DELETIONS, RETRY_INTERVAL);
        loop {
            if !self.health().is_unreachable() {
                while entries.has_room()
                    && let Some(work) = self.sessions.next_entries()
                {
                    entries.push(self.write(work));
                }
                while deletions.has_room()
                    && let Some(work) = self.sessions.next_deletions()
                {
                    deletions.push(self.write(work));
                }
                if !self.sessions.has_unconfirmed() {
                    self.on_all_written();
                }
            }
            select! {
                () = entries.next_change() => {}
                () = deletions.next_change() => {}
                () = self.sessions.wait_for_work() => {}
                () = self.directory_reachable.notified() => {}
            }
        }
    }

    /// Writes everything queued, stopping if a write fails.
    async fn write_all(&self) {
        let next = || {
            self.sessions
                .next_deletions()
                .or_else(|| self.sessions.next_entries())
        };
        while let Some(work) = next() {
            if !self.write(work).await {
                return;
            }
        }
    }

    /// Writes a batch, and returns `true` if the directory accepted it.
    async fn write(&self, work: Work) -> bool {
        let written = match work {
            Work::Delete(batch) => {
                let deletions = batch.into_iter().map(|(session, tombstone)| async move {
                    let deleted = self.directory.delete(session, tombstone).await;
                    self.sessions.on_deletion_result(session, deleted.is_ok());
                    deleted
                });
                join_all(deletions).await.into_iter().collect()
            }
            Work::Register(batch) => {
                match self.directory.register(self.owner, &batch.sessions).await {
                    Ok(differing) => {
                        self.sessions.on_written(batch, &differing);
                        Ok(())
                    }
                    Err(error) => {
                        self.sessions.requeue(batch);
                        Err(error)
                    }
                }
            }
        };
        if let Err(error) = &written {
            self.unwritten_warning.warn(&format_args!(
                "this instance's sessions have not been written yet: {error}"
            ));
        }
        written.is_ok()
    }

    fn on_all_written(&self) {
        let was_consistent = self.consistent_since().is_some();
        self.health().on_all_written(Instant::now());
        let is_consistent = self.consistent_since().is_some();
        if is_consistent && !was_consistent {
            // Send a heartbeat right away, because other instances are waiting for it to report this.
            self.heartbeat_due.notify_one();
        }
        if is_consistent && self.unreachable_warning.clear() {
            log(|| {
                tracing::info!(
                    "the directory is reachable again, and all of this instance's sessions have been written"
                )
            });
        }
    }

    fn health(&self) -> MutexGuard<'_, DirectoryHealth> {
        lock(&self.health)
    }
}

impl Debug for Heartbeat {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let since = self.consistent_since();
        f.debug_struct("Heartbeat")
            .field("owner", &self.owner)
            .field("consistent_since", &since)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
