//! Timer entries, each of which calls its target once its deadline has passed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use super::lateness::{LatenessTracker, RECHECK_DELAY, RECHECK_TOLERANCE, Timeliness};

/// Lateness beyond which a runtime is considered to have stalled.
pub(crate) const STALL_THRESHOLD: Duration = Duration::from_secs(1);

/// Maximum number of times a deadline is rechecked in a row.
///
/// On a machine that is never on time, this delays the end of an orphan, an idle session or an unread stream by about a second.
pub(crate) const MAX_RECHECKS: u8 = 10;

/// The target of a timer entry.
pub(crate) trait OnDeadline: Send + Sync {
    /// Handles an expired deadline. Returns the next deadline, or `None` to disarm the entry.
    ///
    /// If [`reset_earlier`](super::TimerHandle::reset_earlier) is called in the meantime, two calls to this method can overlap.
    ///
    /// A target with several deadlines gets each one's lateness from `tracker`. If it only handles some of them, it must reset its handle
    /// to the earliest of the rest.
    fn on_deadline(&self, tracker: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm>;
}

/// When an entry expires next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rearm {
    /// At this time.
    At(Instant),
    /// [`RECHECK_DELAY`] later, because the timer was [delayed](Timeliness::Delayed).
    ///
    /// Used if the deadline seems to have passed but must be rechecked, at most [`MAX_RECHECKS`] times in a row.
    Soon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId(u64);

/// All entries, ordered by deadline.
///
/// A `Weak` keeps its target's memory allocated, so an entry is removed along with its [`TimerHandle`](super::TimerHandle).
#[derive(Default)]
pub(super) struct TimerEntries {
    due: BTreeSet<(Instant, EntryId)>,
    entries: BTreeMap<EntryId, TimerEntry>,
    last_id: u64,
    /// The earliest wake-up time that the timer tasks have been notified of.
    pub(super) next_wake: Option<Instant>,
    /// Start of the latest turn that left expired entries behind.
    pub(super) backlog_at: Option<Instant>,
}

struct TimerEntry {
    target: Weak<dyn OnDeadline>,
    /// `None` while the target is handling its deadline, or if the entry is disarmed.
    deadline: Option<Instant>,
    /// Number of consecutive rechecks.
    rechecks: u8,
}

/// An entry whose deadline has passed.
pub(super) struct ExpiredEntry {
    deadline: Instant,
    target: Arc<dyn OnDeadline>,
    rechecks: u8,
}

/// A handled entry's next deadline.
pub(super) struct Requeue {
    deadline: Option<Instant>,
    rechecks: u8,
}

// === impl TimerEntries ===

impl TimerEntries {
    pub(super) fn add(&mut self, at: Instant, target: Weak<dyn OnDeadline>) -> EntryId {
        self.last_id += 1;
        let id = EntryId(self.last_id);
        let entry = TimerEntry {
            target,
            deadline: Some(at),
            rechecks: 0,
        };
        self.entries.insert(id, entry);
        self.due.insert((at, id));
        id
    }

    #[cfg(test)]
    pub(super) fn deadline(&self, id: EntryId) -> Option<Instant> {
        self.entries.get(&id)?.deadline
    }

    /// Removes an entry. Returns its target, which must be dropped without holding the lock.
    pub(super) fn remove(&mut self, id: EntryId) -> Option<Weak<dyn OnDeadline>> {
        let entry = self.entries.remove(&id)?;
        if let Some(at) = entry.deadline {
            self.due.remove(&(at, id));
        }
        Some(entry.target)
    }

    /// Moves a deadline to `at`, unless an earlier deadline is set.
    pub(super) fn reset_earlier(&mut self, id: EntryId, at: Instant) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.deadline.is_none_or(|later| at < later)
        {
            if let Some(later) = entry.deadline.replace(at) {
                self.due.remove(&(later, id));
            }
            self.due.insert((at, id));
        }
    }

    /// Disarms and returns the earliest expired entry, or `None` if no entry has expired.
    ///
    /// The caller must drop its target without holding the lock.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<(EntryId, ExpiredEntry)> {
        loop {
            let (at, id) = *self.due.first().filter(|(at, _)| *at <= now)?;
            self.due.remove(&(at, id));
            // While a handle is being dropped, its target can no longer be upgraded.
            if let Some(entry) = self.entries.get_mut(&id)
                && let Some(at) = entry.deadline.take()
                && let Some(target) = entry.target.upgrade()
            {
                let rechecks = entry.rechecks;
                return Some((
                    id,
                    ExpiredEntry {
                        deadline: at,
                        target,
                        rechecks,
                    },
                ));
            }
        }
    }

    /// Sets an entry's next deadline.
    ///
    /// An earlier deadline set in the meantime takes precedence. Does nothing if the handle has been dropped.
    pub(super) fn requeue(&mut self, id: EntryId, requeue: &Requeue) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.rechecks = requeue.rechecks;
        }
        if let Some(at) = requeue.deadline {
            self.reset_earlier(id, at);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns `true` if the timer tasks must be woken for an earlier deadline.
    ///
    /// If so, records that they are being woken.
    pub(super) fn needs_wake(&mut self) -> bool {
        let next = self.next();
        let is_earlier = next.is_some_and(|next| self.next_wake.is_none_or(|at| next < at));
        if is_earlier {
            self.next_wake = next;
        }
        is_earlier
    }

    /// Records the end of a turn, and returns when the next turn is due.
    ///
    /// The next turn is due at once if expired entries remain. Returns `None` if no entry is armed.
    pub(super) fn end_turn(&mut self, now: Instant) -> Option<Instant> {
        self.next_wake = self.next();
        if self.next_wake.is_some_and(|at| at <= now) {
            // A turn with a slow target can end after later turns.
            self.backlog_at = self.backlog_at.max(Some(now));
        }
        self.next_wake
    }

    /// Returns the time by which a turn should have started, or `None` if no entry is armed.
    pub(super) fn turn_due_at(&self) -> Option<Instant> {
        let awake_at = self.next_wake?;
        Some(self.backlog_at.map_or(awake_at, |at| at.max(awake_at)))
    }
}

// === impl ExpiredEntry ===

impl ExpiredEntry {
    pub(super) fn run(self, tracker: &LatenessTracker) -> Requeue {
        let now = tracker.now();
        let timeliness = match tracker.lateness(self.deadline) {
            late if late > STALL_THRESHOLD => Timeliness::Late,
            _ if tracker.was_stalled(self.deadline) => Timeliness::Late,
            // After `MAX_RECHECKS`, treat a machine that is never on time as if it were.
            late if late > RECHECK_TOLERANCE && self.rechecks < MAX_RECHECKS => Timeliness::Delayed,
            _ => Timeliness::OnTime,
        };
        let (at, rechecks) = match self.target.on_deadline(tracker, timeliness) {
            Some(Rearm::At(at)) => (Some(at), 0),
            Some(Rearm::Soon) => (
                now.checked_add(RECHECK_DELAY),
                self.rechecks.saturating_add(1),
            ),
            None => (None, 0),
        };
        Requeue {
            deadline: at,
            rechecks,
        }
    }
}

#[cfg(test)]
mod tests;
