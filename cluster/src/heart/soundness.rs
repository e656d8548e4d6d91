//! Whether the directory is sound, decided from heartbeats, without clock and without input or output.
//!
//! 1. It is sound from when an answered heartbeat found everything as it was left, and all sessions of this instance were
//!    written, until a heartbeat is not answered, or finds another start of the engine or no lease.
//! 2. After each of these everything is written again before it is sound again. What was written meanwhile counts, unless
//!    there is a new reason: an engine that answers every second time comes to an end with it.
//! 3. One beat after a lease was made anew everything is written once more, although it is sound: who saw that there was none
//!    may have claimed a session a moment after. This instance learns of it from what it writes.
//! 4. Where no heart beats any more it is not sound: an answer counts for as long as the lease that it renewed.

use tokio::time::Instant;

use crate::directory::{Beat, EngineRun, LEASE};

/// What heartbeats said of the directory.
#[derive(Debug)]
pub(super) struct Soundness {
    phase: Phase,
    /// Which engine answered last.
    run: Option<EngineRun>,
    /// When the last heartbeat began that was answered.
    beat: Option<Instant>,
    /// The heartbeat before found no lease.
    had_no_lease: bool,
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
    /// The lease is to be made anew.
    pub(super) lease: bool,
    /// All sessions are to be written again.
    pub(super) write_all: bool,
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
            had_no_lease: false,
        }
    }

    /// A heartbeat that began then was answered.
    pub(super) fn answered(&mut self, begun: Instant, beat: Beat) -> Todo {
        let is_same_run = self.run.as_ref() == Some(&beat.run);
        let is_in_time = self.is_fresh(begun);
        let was_lost = !is_same_run || !is_in_time || !beat.was_alive;
        let write_all = was_lost
            || self.phase
                == Phase::Away {
                    must_write_all: true,
                };
        if write_all || matches!(self.phase, Phase::Away { .. }) {
            self.phase = Phase::Writing;
        }
        self.run = Some(beat.run);
        self.beat = Some(begun);
        let had_no_lease = std::mem::replace(&mut self.had_no_lease, !beat.was_alive);
        Todo {
            lease: !beat.was_alive,
            write_all: write_all || had_no_lease,
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

    /// Whether the lease that was renewed last lasts, as far as this side can tell.
    fn is_fresh(&self, now: Instant) -> bool {
        self.beat
            .is_some_and(|beat| now.saturating_duration_since(beat) < LEASE)
    }
}

#[cfg(test)]
mod model;
