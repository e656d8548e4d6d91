//! Alarms: the things to look at when their times come.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use super::watch::{GLANCE, Noticed, ON_TIME, Watch};

/// How late something may be noticed before the runtime counts as starved: 1 s.
pub(crate) const LATE: Duration = Duration::from_secs(1);

/// How often something is looked at again at most: 10 times. A machine that is never on time then takes about a second
/// longer to end an orphan, an idle session, or a stream that is not read.
pub(crate) const MAX_GLANCES: u8 = 10;

/// Something that has a time.
pub(crate) trait Timed: Send + Sync {
    /// Looks at it. Says when to look again, if at all. Looks may overlap if its ticket was told an
    /// [earlier](super::Ticket::by) time meanwhile.
    ///
    /// If it has several times it judges for each by the watch how late that was noticed. It does a part of what is due,
    /// and has its ticket told when the rest is.
    fn look(&self, watch: &Watch, noticed: Noticed) -> Option<NextLook>;
}

/// When something is to be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextLook {
    /// At this time.
    At(Instant),
    /// A moment later, but not often in a row: it seems to be over, and the look was [delayed](Noticed::Delayed).
    Soon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AlarmId(u64);

/// Everything that has a ticket, in the order of its times.
///
/// A `Weak` keeps the memory of what it points to, so none is kept longer than the [`Ticket`](super::Ticket).
#[derive(Default)]
pub(super) struct Alarms {
    due: BTreeSet<(Instant, AlarmId)>,
    /// All that have a ticket.
    all: BTreeMap<AlarmId, Alarm>,
    added: u64,
    /// When somebody looks next, as far as the keepers were told.
    pub(super) awake_at: Option<Instant>,
    /// When the last turn began after which more was due.
    pub(super) behind_at: Option<Instant>,
}

struct Alarm {
    timed: Weak<dyn Timed>,
    /// `None` while it is being looked at, or needs no look.
    at: Option<Instant>,
    /// How many looks in a row were delayed and found that it seems to be over.
    glances: u8,
}

/// Something whose time has come.
pub(super) struct Due {
    at: Instant,
    timed: Arc<dyn Timed>,
    glances: u8,
}

/// When to look at something again.
pub(super) struct Again {
    at: Option<Instant>,
    glances: u8,
}

// === impl Alarms ===

impl Alarms {
    pub(super) fn add(&mut self, at: Instant, timed: Weak<dyn Timed>) -> AlarmId {
        self.added += 1;
        let id = AlarmId(self.added);
        let alarm = Alarm {
            timed,
            at: Some(at),
            glances: 0,
        };
        self.all.insert(id, alarm);
        self.due.insert((at, id));
        id
    }

    #[cfg(test)]
    pub(super) fn at(&self, id: AlarmId) -> Option<Instant> {
        self.all.get(&id)?.at
    }

    /// Removes what has lost its ticket.
    pub(super) fn remove(&mut self, id: AlarmId) -> Option<Weak<dyn Timed>> {
        let alarm = self.all.remove(&id)?;
        if let Some(at) = alarm.at {
            self.due.remove(&(at, id));
        }
        Some(alarm.timed)
    }

    /// Has it looked at no later than this.
    pub(super) fn by(&mut self, id: AlarmId, at: Instant) {
        if let Some(alarm) = self.all.get_mut(&id)
            && alarm.at.is_none_or(|later| at < later)
        {
            if let Some(later) = alarm.at.replace(at) {
                self.due.remove(&(later, id));
            }
            self.due.insert((at, id));
        }
    }

    /// Takes out what is to be looked at now, the earliest first. The caller drops it, without the lock.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<(AlarmId, Due)> {
        loop {
            let (at, id) = *self.due.first().filter(|(at, _)| *at <= now)?;
            self.due.remove(&(at, id));
            // One that is about to lose its ticket has gone already.
            if let Some(alarm) = self.all.get_mut(&id)
                && let Some(at) = alarm.at.take()
                && let Some(timed) = alarm.timed.upgrade()
            {
                let glances = alarm.glances;
                return Some((id, Due { at, timed, glances }));
            }
        }
    }

    /// Has it looked at again, if its ticket was not dropped meanwhile.
    pub(super) fn again(&mut self, id: AlarmId, again: &Again) {
        if let Some(alarm) = self.all.get_mut(&id) {
            alarm.glances = again.glances;
        }
        if let Some(at) = again.at {
            self.by(id, at);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Whether the keepers must be told of an earlier time, and notes that they are.
    pub(super) fn must_tell(&mut self) -> bool {
        let next = self.next();
        let is_news = next.is_some_and(|next| self.awake_at.is_none_or(|at| next < at));
        if is_news {
            self.awake_at = next;
        }
        is_news
    }

    /// Notes that a keeper has had a turn, and says when it comes back: at once if more is due.
    pub(super) fn come_back(&mut self, now: Instant) -> Option<Instant> {
        self.awake_at = self.next();
        if self.awake_at.is_some_and(|at| at <= now) {
            // One whose look lasted comes back after others that began later.
            self.behind_at = self.behind_at.max(Some(now));
        }
        self.awake_at
    }

    /// When somebody should have looked, if somebody is to.
    pub(super) fn looked_at_by(&self) -> Option<Instant> {
        let awake_at = self.awake_at?;
        Some(self.behind_at.map_or(awake_at, |at| at.max(awake_at)))
    }
}

// === impl Due ===

impl Due {
    pub(super) fn look(self, watch: &Watch) -> Again {
        let now = watch.now();
        let noticed = match watch.late(self.at) {
            late if late > LATE => Noticed::Late,
            _ if watch.was_starved(self.at) => Noticed::Late,
            // After so many glances a machine that is never on time ends it all the same.
            late if late > ON_TIME && self.glances < MAX_GLANCES => Noticed::Delayed,
            _ => Noticed::InTime,
        };
        let (at, glances) = match self.timed.look(watch, noticed) {
            Some(NextLook::At(at)) => (Some(at), 0),
            Some(NextLook::Soon) => (now.checked_add(GLANCE), self.glances.saturating_add(1)),
            None => (None, 0),
        };
        Again { at, glances }
    }
}

#[cfg(test)]
mod tests;
