//! Whether the directory is consistent, decided from heartbeats, without clock and without input or output.
//!
//! 1. It is consistent from when an answered heartbeat found everything as it was left, and all sessions of this instance were
//!    written, until a heartbeat is not answered, or finds another start of the backend or no lease.
//! 2. After each of these everything is written again before it is consistent again. What was written meanwhile counts, unless
//!    there is a new reason: a backend that answers every second time comes to an end with it.
//! 3. If the lease was lost, each session is written at a new epoch, after the lease was made anew: an instance that saw that there
//!    was none, and claims a session only then, claims it in vain. That waits while a later claim of another instance may be lost:
//!    then no instance proves anything, and none claims.
//! 4. Where no heartbeat is sent any more it is not consistent: an answer counts for as long as the lease that it renewed.
//! 5. While the lease lasts no other instance claims a session. If it may have lapsed, because this process stood still or
//!    because heartbeats were not answered, each session is verified before it serves anything new ([`Lapse`]). While
//!    heartbeats are made and fail, sessions are served: there availability has precedence, unless the lease is required.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    directory::{BackendRunId, LEASE_TTL},
    sessions::Lapse,
};

/// For how long no heartbeat may begin before the lease counts as lapsed: 5 s. Less than the lease, which a heartbeat renews on
/// its way to the directory. More than a heartbeat that is answered late, and the time to the next.
const STALL_THRESHOLD: Duration = Duration::from_secs(5);

/// For how long the directory must have been consistent for what it does not know to be unknown to all instances: a lease's time. Each
/// instance that had its lease then has renewed it since, or has lost it.
pub(crate) const SETTLE_PERIOD: Duration = LEASE_TTL;

/// What heartbeats found of the directory.
#[derive(Debug)]
pub(super) struct DirectoryHealth {
    phase: Phase,
    /// Which backend answered last.
    run: Option<BackendRunId>,
    /// When the last heartbeat began that was answered.
    last_heartbeat: Option<Instant>,
    /// A heartbeat found no lease, and none was answered since one was made.
    has_no_lease: bool,
    /// Each session is to take a new epoch, because others may have seen that there was no lease. The run of the backend before that.
    renewal_due: Option<BackendRunId>,
    /// When the next heartbeat is so late that the lease may have lapsed. `None` before the first.
    late_from: Option<Instant>,
    /// `None` if no other instance can have claimed a session.
    lapse: Option<Lapse>,
    /// Nothing new is served while the lease may have lapsed, also if heartbeats are made.
    requires_lease: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The last heartbeat was not answered.
    Unreachable {
        must_write_all: bool,
    },
    /// It was, and sessions are being written.
    Writing,
    Consistent {
        since: Instant,
    },
}

/// What an answered heartbeat asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequiredWork {
    /// All sessions are to be written again.
    pub(super) write_all: bool,
    /// Something was lost, be it the lease.
    pub(super) was_lost: bool,
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
            has_no_lease: false,
            renewal_due: None,
            late_from: None,
            lapse: None,
            requires_lease,
        }
    }

    /// A heartbeat begins.
    pub(super) fn on_heartbeat_begun(&mut self, now: Instant) {
        if self.has_stalled(now) {
            self.lapse = Some(Lapse::by_stall(now));
            // Nothing is written before it is known whether there is a lease.
            self.on_heartbeat_failed();
        }
        self.late_from = Some(now + STALL_THRESHOLD);
    }

    /// For which lapse a session is verified before it serves anything new here. `None` if for none.
    pub(super) fn lapse(&self, now: Instant) -> Option<Lapse> {
        if self.has_stalled(now) {
            return Some(Lapse::by_stall(now));
        }
        if self.requires_lease && self.last_heartbeat.is_some() && !self.is_fresh(now) {
            return Some(Lapse::by_failures(now));
        }
        self.lapse
    }

    /// Whether heartbeats were due and not made for so long that the lease may have lapsed.
    fn has_stalled(&self, now: Instant) -> bool {
        self.late_from.is_some_and(|late| now > late)
    }

    /// A heartbeat found no lease. One is about to be made.
    pub(super) fn on_lease_missing(&mut self) {
        self.phase = Phase::Unreachable {
            must_write_all: true,
        };
        self.has_no_lease = true;
        self.require_epoch_renewal();
    }

    /// Each session is to take a new epoch. Before the first heartbeat there was nothing to claim.
    fn require_epoch_renewal(&mut self) {
        self.renewal_due = self.renewal_due.take().or_else(|| self.run.clone());
    }

    /// The run of the backend since which each session is to take a new epoch, if it is to.
    pub(super) fn renewal_due(&self) -> Option<&BackendRunId> {
        self.renewal_due.as_ref()
    }

    /// The sessions take new epochs.
    pub(super) fn on_epochs_renewed(&mut self) {
        self.renewal_due = None;
    }

    /// A heartbeat that began then was answered, and there is a lease.
    pub(super) fn on_heartbeat_answered(
        &mut self,
        begun: Instant,
        run: BackendRunId,
    ) -> RequiredWork {
        let is_same_run = self.run.as_ref() == Some(&run);
        let is_in_time = self.is_fresh(begun);
        let was_alive = !std::mem::take(&mut self.has_no_lease);
        let was_lost = !is_same_run || !is_in_time || !was_alive;
        if is_same_run && was_alive {
            // Whatever this side could tell since the last answer: the lease never lapsed.
            let was_known = |lapse: &Lapse| {
                self.last_heartbeat
                    .is_some_and(|last_heartbeat| lapse.since <= last_heartbeat)
            };
            self.lapse = self.lapse.filter(was_known);
        } else if let Some(Lapse { by_stall: true, .. }) = self.lapse {
            self.require_epoch_renewal();
        } else if !is_in_time && self.last_heartbeat.is_some() {
            self.lapse = self.lapse.or(Some(Lapse::by_failures(begun)));
        }
        let write_all = was_lost
            || self.phase
                == Phase::Unreachable {
                    must_write_all: true,
                };
        if write_all || matches!(self.phase, Phase::Unreachable { .. }) {
            self.phase = Phase::Writing;
        }
        self.run = Some(run);
        self.last_heartbeat = Some(begun);
        RequiredWork {
            write_all,
            was_lost,
        }
    }

    /// A heartbeat was not answered, or the lease could not be made.
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

    /// Nothing is left that must be written again.
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

    /// In which run of the backend all sessions of this instance are written.
    pub(super) fn written_in(&self, now: Instant) -> Option<&BackendRunId> {
        self.consistent_since(now)?;
        self.run()
    }

    /// Whether each instance that had a lease, and has not renewed it since the directory is consistent, has none any more.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        let since = self.consistent_since(now);
        since.is_some_and(|since| now - since >= SETTLE_PERIOD)
    }

    /// Whether the lease that was renewed last lasts, as far as this side can tell.
    fn is_fresh(&self, now: Instant) -> bool {
        self.last_heartbeat
            .is_some_and(|last_heartbeat| now.saturating_duration_since(last_heartbeat) < LEASE_TTL)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
