//! Decides, based on heartbeats, whether the directory is consistent. Uses neither a clock nor I/O.
//!
//! 1. The directory becomes consistent once a heartbeat has been answered and everything that had to be written has been written since. It
//!    stops being consistent when a heartbeat fails, finds the backend in another run, or finds no lease.
//! 2. After each of these events, everything must be rewritten before the directory is considered consistent. Further failed heartbeats do
//!    not restart the writes, so the writes complete even if the backend answers only every other request.
//! 3. If the lease has been lost, it is reacquired, and each session is then written at a new epoch. If another instance saw no lease but
//!    claims a session only after that write, the claim fails. As long as a later claim by another instance may have been lost, new epochs
//!    have to wait. In the meantime, no instance can prove what it needs to claim a session, so none are claimed.
//! 4. If heartbeats stop altogether, the directory stops being consistent too, because an answered heartbeat counts only for the lifetime
//!    of the lease it renewed.
//! 5. While the lease lasts, no other instance claims a session. Once it may have lapsed, because the process stalled or heartbeats went
//!    unanswered, each session is verified before it serves new requests ([`Lapse`]). Unless the lease is required, however, sessions are
//!    served regardless as long as heartbeats are being sent, even if these fail, because availability takes precedence.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    directory::{BackendRunId, DIRECTORY_TIMEOUT, DirectoryTime, LEASE_TTL},
    sessions::Lapse,
};

/// Time since the last answered heartbeat after which a stall may have ended the lease.
///
/// This is less than [`MIN_LEASE`], but more than a late answer and the wait for the next heartbeat take together.
const STALL_THRESHOLD: Duration = Duration::from_secs(5);

/// Maximum time between the starts of two heartbeats, unless the process has stalled.
///
/// This is the heartbeat interval plus two directory timeouts.
const OVERDUE_THRESHOLD: Duration = Duration::from_secs(3);

/// Maximum age of a heartbeat when the directory executes it, by the directory's clock.
///
/// This ensures that the lease lasts for [`MIN_LEASE`] after the heartbeat started, even if the directory's clock has stepped.
pub(super) const MAX_HEARTBEAT_AGE: Duration = DIRECTORY_TIMEOUT;

/// How far the directory's clock can be set back unnoticed.
///
/// A lease may be ahead of that clock by the same amount.
pub(crate) const MAX_BACKWARD_CLOCK_STEP: Duration = Duration::from_secs(1);

/// Minimum lifetime of a lease, counted from the start of its heartbeat.
///
/// The directory may consider the heartbeat to have been created up to [`DIRECTORY_TIMEOUT`] earlier
/// ([`created_at`](crate::directory::Status::created_at)).
pub(crate) const MIN_LEASE: Duration = LEASE_TTL.saturating_sub(DIRECTORY_TIMEOUT);

/// How long the directory must be consistent to rule out unrecorded sessions.
///
/// This is the lifetime of a lease: by then, every instance that had a lease has either renewed or lost it.
pub(crate) const SETTLE_PERIOD: Duration = LEASE_TTL;

/// The state of the directory, as seen by heartbeats.
#[derive(Debug)]
pub(super) struct DirectoryHealth {
    phase: Phase,
    /// The run of the backend that answered last.
    run: Option<BackendRunId>,
    /// When the last answered heartbeat was started.
    last_heartbeat: Option<Instant>,
    /// A local time, with the directory's time at that moment.
    ///
    /// The directory's time may be up to [`DIRECTORY_TIMEOUT`] too early.
    clock: Option<(Instant, DirectoryTime)>,
    /// Whether a heartbeat has found no lease and a new lease has yet to be confirmed.
    has_no_lease: bool,
    /// The run of the backend before new epochs became due, or `None` if they are not due.
    ///
    /// They are due if other instances may have seen this instance without a lease.
    renewal_due: Option<BackendRunId>,
    /// When the last heartbeat was started, answered or not.
    last_started: Option<Instant>,
    /// The lapse for which sessions must be verified, as of the last heartbeat.
    ///
    /// `None` if no other instance can have claimed a session.
    lapse: Option<Lapse>,
    /// Whether to serve nothing new while the lease may have lapsed.
    ///
    /// If set, this applies even if heartbeats are being sent.
    requires_lease: bool,
}

/// What the last heartbeat, and the writes since, indicate about the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The last heartbeat failed, was late, or found no lease, or there has not been one yet.
    Unreachable {
        must_write_all: bool,
    },
    /// The last heartbeat was answered, and sessions are being written.
    Writing,
    Consistent {
        since: Instant,
    },
}

/// What has to be done after an answered heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequiredWork {
    /// Whether all sessions must be rewritten.
    pub(super) write_all: bool,
    /// Whether the directory may have lost data, or the lease may have lapsed.
    pub(super) may_have_lost_data: bool,
}

// === impl DirectoryHealth ===

impl DirectoryHealth {
    pub(super) fn new(requires_lease: bool) -> Self {
        Self {
            phase: Phase::Unreachable {
                must_write_all: true,
            },
            run: None,
            last_heartbeat: None,
            clock: None,
            has_no_lease: false,
            renewal_due: None,
            last_started: None,
            lapse: None,
            requires_lease,
        }
    }

    /// Called when a heartbeat starts.
    pub(super) fn on_heartbeat_started(&mut self, now: Instant) {
        if self.has_stalled(now) {
            self.lapse = Some(Lapse::by_stall(now));
            // Write nothing until it is known whether there is a lease.
            self.on_heartbeat_failed();
        }
        self.last_started = Some(now);
    }

    /// Called when the heartbeat started at `started` has been answered.
    ///
    /// `time` is when the directory executed it, and is stored unless the reply was read late. Returns `true` if the directory's clock has
    /// stepped forward, or this machine was suspended.
    pub(super) fn on_time_read(
        &mut self,
        started: Instant,
        now: Instant,
        time: DirectoryTime,
    ) -> bool {
        let expected = self.clock_at(started);
        let has_stepped = expected.is_some_and(|expected| time.since(expected) > MAX_HEARTBEAT_AGE);
        // Ignore a reply read any later than this, which would set the clock back by more than the lease allows for.
        if now - started <= DIRECTORY_TIMEOUT {
            self.clock = Some((now, time));
        }
        has_stepped
    }

    /// Returns the time on the directory's clock, or `None` if it is not known.
    ///
    /// The result may be up to [`DIRECTORY_TIMEOUT`] too early. If the clock has not been read for a while, the result is a further
    /// [`MAX_BACKWARD_CLOCK_STEP`] earlier, in case the clock has been set back.
    pub(super) fn directory_time(&self, now: Instant) -> Option<DirectoryTime> {
        let (read_at, _) = self.clock?;
        let time = self.clock_at(now)?;
        let is_outdated = now.saturating_duration_since(read_at) > OVERDUE_THRESHOLD;
        Some(if is_outdated {
            time.saturating_sub(MAX_BACKWARD_CLOCK_STEP)
        } else {
            time
        })
    }

    /// Extrapolates the directory's clock, if known, assuming that it has not stepped.
    fn clock_at(&self, now: Instant) -> Option<DirectoryTime> {
        let (read_at, time) = self.clock?;
        Some(time.saturating_add(now.saturating_duration_since(read_at)))
    }

    /// Returns the lapse for which sessions must be verified, or `None` if there is none.
    pub(super) fn lapse(&self, now: Instant) -> Option<Lapse> {
        if self.has_stalled(now) {
            return Some(Lapse::by_stall(now));
        }
        if self.requires_lease && self.last_heartbeat.is_some() && !self.is_fresh(now) {
            return Some(Lapse::by_failures(now));
        }
        self.lapse
    }

    /// Returns `true` if this process has stalled for long enough that the lease may have lapsed.
    ///
    /// The next heartbeat is then overdue.
    fn has_stalled(&self, now: Instant) -> bool {
        let Some(started) = self.last_started else {
            return false;
        };
        let may_lapse_at = self.last_heartbeat.unwrap_or(started) + STALL_THRESHOLD;
        now > may_lapse_at.max(started + OVERDUE_THRESHOLD)
    }

    /// Called when a heartbeat has found no lease, before the lease is reacquired.
    pub(super) fn on_lease_missing(&mut self) {
        self.phase = Phase::Unreachable {
            must_write_all: true,
        };
        self.has_no_lease = true;
        self.require_epoch_renewal();
    }

    /// Requires a new epoch for each session.
    ///
    /// Does nothing before the first answered heartbeat, because until then there was nothing to claim.
    fn require_epoch_renewal(&mut self) {
        self.renewal_due = self.renewal_due.take().or_else(|| self.run.clone());
    }

    /// Returns the backend's run before new epochs became due, or `None` if they are not due.
    pub(super) fn renewal_due(&self) -> Option<&BackendRunId> {
        self.renewal_due.as_ref()
    }

    /// Called when the sessions take new epochs.
    pub(super) fn on_epochs_renewed(&mut self) {
        self.renewal_due = None;
    }

    /// Called when the heartbeat started at `started` has been answered and there is a lease.
    pub(super) fn on_heartbeat_answered(
        &mut self,
        started: Instant,
        run: BackendRunId,
    ) -> RequiredWork {
        let is_same_run = self.run.as_ref() == Some(&run);
        let is_in_time = self.is_fresh(started);
        let was_alive = !std::mem::take(&mut self.has_no_lease);
        let may_have_lost_data = !is_same_run || !is_in_time || !was_alive;
        if is_same_run && was_alive {
            // The lease never lapsed, so any lapse assumed since the last answer did not actually happen.
            let was_known = |lapse: &Lapse| {
                self.last_heartbeat
                    .is_some_and(|last_heartbeat| lapse.since <= last_heartbeat)
            };
            self.lapse = self.lapse.filter(was_known);
        } else if let Some(Lapse { by_stall: true, .. }) = self.lapse {
            // Other instances may have seen this instance without a lease.
            self.require_epoch_renewal();
        } else if !is_in_time && self.last_heartbeat.is_some() {
            self.lapse = self.lapse.or(Some(Lapse::by_failures(started)));
        }
        let write_all = may_have_lost_data
            || self.phase
                == Phase::Unreachable {
                    must_write_all: true,
                };
        if write_all || matches!(self.phase, Phase::Unreachable { .. }) {
            self.phase = Phase::Writing;
        }
        self.run = Some(run);
        self.last_heartbeat = Some(started);
        RequiredWork {
            write_all,
            may_have_lost_data,
        }
    }

    /// Called when a heartbeat has failed or is overdue, and before the lease is released.
    pub(super) fn on_heartbeat_failed(&mut self) {
        self.phase = match self.phase {
            Phase::Consistent { .. } => Phase::Unreachable {
                must_write_all: true,
            },
            Phase::Writing => Phase::Unreachable {
                must_write_all: false,
            },
            unreachable @ Phase::Unreachable { .. } => unreachable,
        };
    }

    /// Called when everything that had to be rewritten has been written.
    ///
    /// This also ends the lapse, unless a stall requires new epochs.
    pub(super) fn on_all_written(&mut self, now: Instant) {
        if self.phase == Phase::Writing {
            self.phase = Phase::Consistent { since: now };
        }
        let is_renewal_due = self.renewal_due.is_some();
        self.lapse = self.lapse.filter(|lapse| lapse.by_stall && is_renewal_due);
    }

    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self.phase, Phase::Unreachable { .. })
    }

    pub(super) fn consistent_since(&self, now: Instant) -> Option<Instant> {
        match self.phase {
            Phase::Consistent { since } if self.is_fresh(now) => Some(since),
            _ => None,
        }
    }

    pub(super) fn run(&self) -> Option<&BackendRunId> {
        self.run.as_ref()
    }

    /// Returns the run of the backend in which all of this instance's sessions have been written.
    ///
    /// Returns `None` while the directory is not consistent.
    pub(super) fn written_in(&self, now: Instant) -> Option<&BackendRunId> {
        self.consistent_since(now)?;
        self.run()
    }

    /// Returns `true` if the directory has been consistent for [`SETTLE_PERIOD`].
    ///
    /// By then, any instance that has not renewed its lease no longer has a lease.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        let since = self.consistent_since(now);
        since.is_some_and(|since| now - since >= SETTLE_PERIOD)
    }

    /// Returns `true` if the lease is still valid, judging by this instance's clock.
    fn is_fresh(&self, now: Instant) -> bool {
        self.last_heartbeat
            .is_some_and(|last| now.saturating_duration_since(last) < MIN_LEASE)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
