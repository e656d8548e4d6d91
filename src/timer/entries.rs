//! Alarms: the things to look at when their times come.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use super::lateness::{LatenessTracker, RECHECK_DELAY, RECHECK_TOLERANCE, Timeliness};

/// How late something may be noticed before the runtime counts as starved: 1 s.
pub(crate) const STALL_THRESHOLD: Duration = Duration::from_secs(1);

/// How often something is looked at again at most: 10 times. A machine that is never on time then takes about a second
/// longer to end an orphan, an idle session, or a stream that is not read.
pub(crate) const MAX_RECHECKS: u8 = 10;

/// Something that has a time.
pub(crate) trait OnDeadline: Send + Sync {
    /// Looks at it. Says when to look again, if at all. Looks may overlap if its ticket was told an
    /// [earlier](super::Ticket::by) time meanwhile.
    ///
    /// If it has several times it judges for each by the watch how late that was noticed. It does a part of what is due,
    /// and has its ticket told when the rest is.
    fn on_deadline(&self, watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm>;
}

/// When something is to be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rearm {
    /// At this time.
    At(Instant),
    /// A moment later, but not often in a row: it seems to be over, and the look was [delayed](Noticed::Delayed).
    Soon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId(u64);

/// Everything that has a ticket, in the order of its times.
///
/// A `Weak` keeps the memory of what it points to, so none is kept longer than the [`Ticket`](super::Ticket).
#[derive(Default)]
pub(super) struct TimerEntries {
    due: BTreeSet<(Instant, EntryId)>,
    /// All that have a ticket.
    entries: BTreeMap<EntryId, TimerEntry>,
    last_id: u64,
    /// When somebody looks next, as far as the keepers were told.
    pub(super) next_wake: Option<Instant>,
    /// When the last turn began after which more was due.
    pub(super) backlog_at: Option<Instant>,
}

struct TimerEntry {
    target: Weak<dyn OnDeadline>,
    /// `None` while it is being looked at, or needs no look.
    deadline: Option<Instant>,
    /// How many looks in a row were delayed and found that it seems to be over.
    rechecks: u8,
}

/// Something whose time has come.
pub(super) struct Expired {
    deadline: Instant,
    target: Arc<dyn OnDeadline>,
    rechecks: u8,
}

/// When to look at something again.
pub(super) struct Requeue {
    deadline: Option<Instant>,
    rechecks: u8,
}

// === impl Alarms ===

impl TimerEntries {
    pub(super) fn add(&mut self, at: Instant, timed: Weak<dyn OnDeadline>) -> EntryId {
        self.last_id += 1;
        let id = EntryId(self.last_id);
        let alarm = TimerEntry {
            target: timed,
            deadline: Some(at),
            rechecks: 0,
        };
        self.entries.insert(id, alarm);
        self.due.insert((at, id));
        id
    }

    #[cfg(test)]
    pub(super) fn deadline(&self, id: EntryId) -> Option<Instant> {
        self.entries.get(&id)?.deadline
    }

    /// Removes what has lost its ticket.
    pub(super) fn remove(&mut self, id: EntryId) -> Option<Weak<dyn OnDeadline>> {
        let alarm = self.entries.remove(&id)?;
        if let Some(at) = alarm.deadline {
            self.due.remove(&(at, id));
        }
        Some(alarm.target)
    }

    /// Has it looked at no later than this.
    pub(super) fn reset_earlier(&mut self, id: EntryId, at: Instant) {
        if let Some(alarm) = self.entries.get_mut(&id)
            && alarm.deadline.is_none_or(|later| at < later)
        {
            if let Some(later) = alarm.deadline.replace(at) {
                self.due.remove(&(later, id));
            }
            self.due.insert((at, id));
        }
    }

    /// Takes out what is to be looked at now, the earliest first. The caller drops it, without the lock.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<(EntryId, Expired)> {
        loop {
            let (at, id) = *self.due.first().filter(|(at, _)| *at <= now)?;
            self.due.remove(&(at, id));
            // One that is about to lose its ticket has gone already.
            if let Some(alarm) = self.entries.get_mut(&id)
                && let Some(at) = alarm.deadline.take()
                && let Some(timed) = alarm.target.upgrade()
            {
                let glances = alarm.rechecks;
                return Some((
                    id,
                    Expired {
                        deadline: at,
                        target: timed,
                        rechecks: glances,
                    },
                ));
            }
        }
    }

    /// Has it looked at again, if its ticket was not dropped meanwhile.
    pub(super) fn requeue(&mut self, id: EntryId, again: &Requeue) {
        if let Some(alarm) = self.entries.get_mut(&id) {
            alarm.rechecks = again.rechecks;
        }
        if let Some(at) = again.deadline {
            self.reset_earlier(id, at);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Whether the keepers must be told of an earlier time, and notes that they are.
    pub(super) fn needs_wake(&mut self) -> bool {
        let next = self.next();
        let is_news = next.is_some_and(|next| self.next_wake.is_none_or(|at| next < at));
        if is_news {
            self.next_wake = next;
        }
        is_news
    }

    /// Notes that a keeper has had a turn, and says when it comes back: at once if more is due.
    pub(super) fn end_turn(&mut self, now: Instant) -> Option<Instant> {
        self.next_wake = self.next();
        if self.next_wake.is_some_and(|at| at <= now) {
            // One whose look lasted comes back after others that began later.
            self.backlog_at = self.backlog_at.max(Some(now));
        }
        self.next_wake
    }

    /// When somebody should have looked, if somebody is to.
    pub(super) fn turn_due_at(&self) -> Option<Instant> {
        let awake_at = self.next_wake?;
        Some(self.backlog_at.map_or(awake_at, |at| at.max(awake_at)))
    }
}

// === impl Due ===

impl Expired {
    pub(super) fn run(self, watch: &LatenessTracker) -> Requeue {
        let now = watch.now();
        let noticed = match watch.lateness(self.deadline) {
            late if late > STALL_THRESHOLD => Timeliness::Late,
            _ if watch.was_stalled(self.deadline) => Timeliness::Late,
            // After so many glances a machine that is never on time ends it all the same.
            late if late > RECHECK_TOLERANCE && self.rechecks < MAX_RECHECKS => Timeliness::Delayed,
            _ => Timeliness::OnTime,
        };
        let (at, glances) = match self.target.on_deadline(watch, noticed) {
            Some(Rearm::At(at)) => (Some(at), 0),
            Some(Rearm::Soon) => (
                now.checked_add(RECHECK_DELAY),
                self.rechecks.saturating_add(1),
            ),
            None => (None, 0),
        };
        Requeue {
            deadline: at,
            rechecks: glances,
        }
    }
}

#[cfg(test)]
mod tests;
