//! Decides from heartbeats whether the directory is consistent. Reads no clock and does no I/O.
//!
//! 1. The directory becomes consistent once a heartbeat has been answered and everything that had to be written since has been written. It
//!    stops being consistent when a heartbeat is not answered, or finds another run of the backend or no lease.
//! 2. After each of these events, everything must be written again before the directory is consistent again. A heartbeat that is not
//!    answered in the meantime does not restart the writes. They therefore complete even with a backend that answers only every second request.
//! 3. If the lease was lost, each session is written at a new epoch, after the lease was acquired again. An instance that saw no lease, and
//!    claims a session only after that, then loses the claim. New epochs wait while a later claim of another instance may be lost.
//!    Meanwhile no instance proves anything, and none claims.
//! 4. If heartbeats stop, the directory is not consistent, because an answer counts only for the lifetime of the lease that it
//!    renewed.
//! 5. While the lease lasts, no other instance claims a session. If the lease may have lapsed, because the process stalled or
//!    heartbeats were not answered, each session is verified before it serves anything new ([`Lapse`]). While heartbeats are sent and
//!    fail, sessions are served, because availability takes precedence there, unless the lease is required.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    directory::{BackendRunId, DIRECTORY_TIMEOUT, DirectoryTime, LEASE_TTL},
    sessions::Lapse,
};

/// Time after the last answered heartbeat at which a stall may have ended the lease: 5 s.
///
/// Chosen to be less than [`MIN_LEASE`], and more than the time of a late answer and the interval to the next heartbeat.
const STALL_THRESHOLD: Duration = Duration::from_secs(5);

/// Maximum time between the starts of two heartbeats, unless the process has stalled: 3 s.
///
/// Equal to the heartbeat interval plus two timeouts.
const OVERDUE_THRESHOLD: Duration = Duration::from_secs(3);

/// Maximum age of a heartbeat at its execution, by the directory's clock: 500 ms.
///
/// Chosen so that the lease lasts for [`MIN_LEASE`] after the heartbeat started, even if the directory's clock has stepped.
pub(super) const MAX_HEARTBEAT_AGE: Duration = DIRECTORY_TIMEOUT;

/// Maximum time by which the directory's clock can be set back unnoticed: 1 s.
///
/// Equal to the time by which a lease may be ahead of that clock.
pub(crate) const MAX_BACKWARD_CLOCK_STEP: Duration = Duration::from_secs(1);

/// Minimum lifetime of a lease after its heartbeat started: 5.5 s.
///
/// The directory may count the heartbeat as created up to [`DIRECTORY_TIMEOUT`] earlier
/// ([`created_at`](crate::directory::Status::created_at)).
pub(crate) const MIN_LEASE: Duration = LEASE_TTL.saturating_sub(DIRECTORY_TIMEOUT);

/// Time of consistency after which no instance has a session whose record is missing: 6 s.
///
/// Chosen as the lifetime of a lease. Each instance that had a lease has renewed it since, or has lost it.
pub(crate) const SETTLE_PERIOD: Duration = LEASE_TTL;

/// The state of the directory, as heartbeats found it.
#[derive(Debug)]
pub(super) struct DirectoryHealth {
    phase: Phase,
    /// The run of the backend that answered last.
    run: Option<BackendRunId>,
    /// The start of the last heartbeat that was answered.
    last_heartbeat: Option<Instant>,
    /// A local time, and the directory's time at that moment.
    ///
    /// The latter may be up to [`DIRECTORY_TIMEOUT`] too early.
    clock: Option<(Instant, DirectoryTime)>,
    /// A heartbeat found no lease, and the acquisition of a new one is not confirmed yet.
    has_no_lease: bool,
    /// The run of the backend before new epochs became due. `None` if they are not due.
    ///
    /// They are due if other instances may have seen this one without a lease.
    renewal_due: Option<BackendRunId>,
    /// When the last heartbeat started, answered or not.
    last_started: Option<Instant>,
    /// The lapse for which sessions must be verified, as of the last heartbeat. `None` if no other instance can have claimed a session.
    lapse: Option<Lapse>,
    /// Nothing new is served while the lease may have lapsed, even if heartbeats are sent.
    requires_lease: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The last heartbeat was not answered, was late, or found no lease. Also the state before the first.
    Unreachable {
        must_write_all: bool,
    },
    /// The last heartbeat was answered, and sessions are being written.
    Writing,
    Consistent {
        since: Instant,
    },
}

/// The work that an answered heartbeat requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequiredWork {
    /// All sessions must be written again.
    pub(super) write_all: bool,
    /// The directory may have lost data, or the lease may have lapsed.
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
            // Nothing is written before it is known whether there is a lease.
            self.on_heartbeat_failed();
        }
        self.last_started = Some(now);
    }

    /// Called when the heartbeat that started at `started` was answered. The directory executed it at `time`.
    ///
    /// Stores the time, unless the reply was read late. Returns `true` if the directory's clock has stepped forward, or this machine was
    /// suspended.
    pub(super) fn on_time_read(
        &mut self,
        started: Instant,
        now: Instant,
        time: DirectoryTime,
    ) -> bool {
        let expected = self.clock_at(started);
        let has_stepped = expected.is_some_and(|expected| time.since(expected) > MAX_HEARTBEAT_AGE);
        // An answer that was read later would set the clock back by more than the lease allows for.
        if now - started <= DIRECTORY_TIMEOUT {
            self.clock = Some((now, time));
        }
        has_stepped
    }

    /// Returns the time by the directory's clock, or up to [`DIRECTORY_TIMEOUT`] earlier. Returns `None` if it is not known.
    ///
    /// If the clock has not been read for a while, the result is a further [`MAX_BACKWARD_CLOCK_STEP`] earlier, because the clock
    /// may have been set back.
    pub(super) fn directory_time(&self, now: Instant) -> Option<DirectoryTime> {
        let (at, _) = self.clock?;
        let time = self.clock_at(now)?;
        let is_outdated = now.saturating_duration_since(at) > OVERDUE_THRESHOLD;
        Some(if is_outdated {
            time.saturating_sub(MAX_BACKWARD_CLOCK_STEP)
        } else {
            time
        })
    }

    /// Extrapolates the directory's clock, assuming that it has not stepped. Returns `None` if it is not known.
    fn clock_at(&self, now: Instant) -> Option<DirectoryTime> {
        let (at, time) = self.clock?;
        Some(time.saturating_add(now.saturating_duration_since(at)))
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

    /// Returns `true` if this process has stalled, and the lease may have lapsed in the meantime. The next heartbeat is late then.
    fn has_stalled(&self, now: Instant) -> bool {
        let Some(started) = self.last_started else {
            return false;
        };
        let may_lapse_at = self.last_heartbeat.unwrap_or(started) + STALL_THRESHOLD;
        now > may_lapse_at.max(started + OVERDUE_THRESHOLD)
    }

    /// Called when a heartbeat found no lease, before the lease is acquired again.
    pub(super) fn on_lease_missing(&mut self) {
        self.phase = Phase::Unreachable {
            must_write_all: true,
        };
        self.has_no_lease = true;
        self.require_epoch_renewal();
    }

    /// Requires a new epoch for each session. Does nothing before the first answered heartbeat, because there was nothing to claim.
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

    /// Called when the heartbeat that started at `started` was answered, and there is a lease.
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
            // The lease never lapsed, so a lapse that was assumed since the last answer did not happen.
            let was_known = |lapse: &Lapse| {
                self.last_heartbeat
                    .is_some_and(|last_heartbeat| lapse.since <= last_heartbeat)
            };
            self.lapse = self.lapse.filter(was_known);
        } else if let Some(Lapse { by_stall: true, .. }) = self.lapse {
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

    /// Called when a heartbeat failed or is late, and before the lease is released.
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

    /// Called when everything that had to be written again has been written. Also ends the lapse, unless a stall requires new epochs.
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

    /// Returns the run of the backend in which all sessions of this instance have been written.
    ///
    /// Returns `None` while the directory is not consistent.
    pub(super) fn written_in(&self, now: Instant) -> Option<&BackendRunId> {
        self.consistent_since(now)?;
        self.run()
    }

    /// Returns `true` if the directory has been consistent for [`SETTLE_PERIOD`].
    ///
    /// An instance that has not renewed its lease within that period no longer has one.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        let since = self.consistent_since(now);
        since.is_some_and(|since| now - since >= SETTLE_PERIOD)
    }

    /// Returns `true` if the lease is still valid, by this instance's clock.
    fn is_fresh(&self, now: Instant) -> bool {
        self.last_heartbeat
            .is_some_and(|last| now.saturating_duration_since(last) < MIN_LEASE)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
