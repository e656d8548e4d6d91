//! Whether the directory is sound, decided from heartbeats, without clock and without input or output.
//!
//! 1. It is sound from when an answered heartbeat found everything as it was left, and all sessions of this instance were
//!    written, until a heartbeat is not answered, or finds another start of the engine or no lease.
//! 2. After each of these everything is written again before it is sound again. What was written meanwhile counts, unless
//!    there is a new reason: an engine that answers every second time comes to an end with it.
//! 3. If the lease was lost, each session is written at a new epoch, after the lease was made anew: an instance that saw that there
//!    was none, and claims a session only then, claims it in vain.
//! 4. Where no heart beats any more it is not sound: an answer counts for as long as the lease that it renewed.
//! 5. While the lease lasts no other instance claims a session. If it may have lapsed, because this process stood still or
//!    because heartbeats were not answered, each session is verified by taking a new epoch before it serves anything new
//!    ([`Soundness::verify_since`]). While heartbeats are made and fail, sessions are served: there availability has precedence.

use std::time::Duration;

use tokio::time::Instant;

use crate::directory::{EngineRun, LEASE};

/// For how long no heartbeat may begin before the lease counts as lapsed: 5 s. Less than the lease, which a heartbeat renews on
/// its way to the directory. More than a heartbeat that is answered late, and the time to the next.
const STOOD_STILL: Duration = Duration::from_secs(5);

/// For how long the directory must have been sound for what it does not know to be unknown to all instances: a lease's time. Each
/// instance that had its lease then has renewed it since, or has lost it.
pub(crate) const SETTLED: Duration = LEASE;

/// What heartbeats found of the directory.
#[derive(Debug)]
pub(super) struct Soundness {
    phase: Phase,
    /// Which engine answered last.
    run: Option<EngineRun>,
    /// When the last heartbeat began that was answered.
    beat: Option<Instant>,
    /// A heartbeat found no lease, and none was answered since one was made.
    has_no_lease: bool,
    /// When the directory was last found to have lost something.
    lost: Option<Instant>,
    /// When the last heartbeat began, answered or not.
    attempt: Option<Instant>,
    /// Since when sessions are verified, because another instance may have claimed them. `None` if none can have.
    lapsed: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The last heartbeat was not answered.
    Away {
        must_write_all: bool,
    },
    /// It was, and sessions are being written.
    Writing,
    Sound {
        since: Instant,
    },
}

/// What an answered heartbeat asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Todo {
    /// All sessions are to be written again.
    pub(super) write_all: bool,
    /// At a new epoch each.
    pub(super) renew_all: bool,
}

// === impl Soundness ===

impl Soundness {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Away {
                must_write_all: true,
            },
            run: None,
            beat: None,
            has_no_lease: false,
            lost: None,
            attempt: None,
            lapsed: None,
        }
    }

    /// A heartbeat begins.
    pub(super) fn begins(&mut self, now: Instant) {
        if self.has_stood_still(now) {
            self.lapsed = Some(now);
        }
        self.attempt = Some(now);
    }

    /// Since when a session must have been written to serve anything new here. `None` if each may.
    pub(super) fn verify_since(&self, now: Instant) -> Option<Instant> {
        if self.has_stood_still(now) {
            return Some(now);
        }
        self.lapsed
    }

    /// Whether heartbeats were due and not made for so long that the lease may have lapsed.
    fn has_stood_still(&self, now: Instant) -> bool {
        self.attempt
            .is_some_and(|attempt| now.saturating_duration_since(attempt) > STOOD_STILL)
    }

    /// A heartbeat found no lease. One is about to be made.
    pub(super) fn has_no_lease(&mut self) {
        self.phase = Phase::Away {
            must_write_all: true,
        };
        self.has_no_lease = true;
    }

    /// A heartbeat that began then was answered, and there is a lease.
    pub(super) fn answered(&mut self, begun: Instant, run: EngineRun) -> Todo {
        let is_same_run = self.run.as_ref() == Some(&run);
        let is_in_time = self.is_fresh(begun);
        let was_alive = !std::mem::take(&mut self.has_no_lease);
        let was_lost = !is_same_run || !is_in_time || !was_alive;
        if self.run.is_some() && (!is_same_run || !was_alive) {
            self.lost = Some(begun);
        }
        if is_same_run && was_alive {
            // Whatever this side could tell: the lease never lapsed.
            self.lapsed = None;
        } else if !is_in_time && self.beat.is_some() {
            self.lapsed = self.lapsed.or(Some(begun));
        }
        let write_all = was_lost
            || self.phase
                == Phase::Away {
                    must_write_all: true,
                };
        if write_all || matches!(self.phase, Phase::Away { .. }) {
            self.phase = Phase::Writing;
        }
        self.run = Some(run);
        self.beat = Some(begun);
        Todo {
            write_all,
            renew_all: was_lost,
        }
    }

    /// A heartbeat was not answered, or the lease could not be made.
    pub(super) fn failed(&mut self) {
        self.phase = match self.phase {
            Phase::Sound { .. } => Phase::Away {
                must_write_all: true,
            },
            Phase::Writing => Phase::Away {
                must_write_all: false,
            },
            away @ Phase::Away { .. } => away,
        };
    }

    /// Nothing is left that must be written again.
    pub(super) fn wrote_all(&mut self, now: Instant) {
        if self.phase == Phase::Writing {
            self.phase = Phase::Sound { since: now };
            self.lapsed = None;
        }
    }

    pub(super) fn is_away(&self) -> bool {
        matches!(self.phase, Phase::Away { .. })
    }

    pub(super) fn sound_since(&self, now: Instant) -> Option<Instant> {
        match self.phase {
            Phase::Sound { since } if self.is_fresh(now) => Some(since),
            _ => None,
        }
    }

    pub(super) fn run(&self) -> Option<&EngineRun> {
        self.run.as_ref()
    }

    /// In which run of the engine all sessions of this instance are written.
    pub(super) fn written_in(&self, now: Instant) -> Option<&EngineRun> {
        self.sound_since(now)?;
        self.run()
    }

    /// Whether each instance that had a lease, and has not renewed it since the directory is sound, has none any more.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        let since = self.sound_since(now);
        since.is_some_and(|since| now - since >= SETTLED)
    }

    /// Whether the directory was found to have lost something, and others may not have written it again.
    pub(super) fn has_lost_lately(&self, now: Instant) -> bool {
        self.lost.is_some() && !self.is_settled(now)
    }

    /// Whether the lease that was renewed last lasts, as far as this side can tell.
    fn is_fresh(&self, now: Instant) -> bool {
        self.beat
            .is_some_and(|beat| now.saturating_duration_since(beat) < LEASE)
    }
}

#[cfg(test)]
mod model;
