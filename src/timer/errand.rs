//! Tasks that another runtime takes if their own does not come to them.
//!
//! A task stays with the timer until it begins. Its own runtime has only a [`Runner`](super::runner::Runner) that
//! fetches it then, so the runtime that comes first has it, and nothing runs twice. A runner that is dropped leaves its
//! task to the keepers of other runtimes, but only [`MAX_MOVES`](super::runner::MAX_MOVES) times: runtimes that end one
//! after another do not pass a task on without end.

use std::{collections::BTreeMap, pin::Pin};

use tokio::time::Instant;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Until when a task may go on to another runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moves {
    /// Until it ends. It waits for nothing that belongs to a runtime.
    Always,
    /// Until it begins.
    BeforeItBegins,
}

pub(super) struct Errand {
    pub(super) moves: Moves,
    pub(super) task: Task,
    pub(super) moved: u8,
}

/// The tasks that have not begun, or lost their runtime.
#[derive(Default)]
pub(super) struct Errands {
    pub(super) waiting: BTreeMap<u64, Waiting>,
    added: u64,
    /// When the keepers look for what is overdue, if they were told to.
    looked_at: Option<Instant>,
}

pub(super) struct Waiting {
    pub(super) errand: Errand,
    /// When any runtime may take it. `None` if it has none of its own: at once.
    pub(super) overdue: Option<Instant>,
}

// === impl Errands ===

impl Errands {
    pub(super) fn add(&mut self, errand: Errand, overdue: Option<Instant>) -> u64 {
        self.added += 1;
        self.waiting.insert(self.added, Waiting { errand, overdue });
        self.added
    }

    pub(super) fn take(&mut self, id: u64) -> Option<Errand> {
        Some(self.waiting.remove(&id)?.errand)
    }

    /// Whether the keepers must be told that they are to look at this time.
    pub(super) fn must_tell(&mut self, overdue: Instant, now: Instant) -> bool {
        let is_news = self.looked_at.is_none_or(|at| at <= now || overdue < at);
        if is_news {
            self.looked_at = Some(overdue);
        }
        is_news
    }

    /// What any runtime may take, and when to look again.
    pub(super) fn take_due(&mut self, now: Instant) -> (Vec<(u64, Errand)>, Option<Instant>) {
        let is_due = |waiting: &Waiting| waiting.overdue.is_none_or(|at| at <= now);
        let due = self.take_if(is_due);
        if self.looked_at.is_none_or(|at| at <= now) {
            let overdue = self.waiting.values().filter_map(|waiting| waiting.overdue);
            self.looked_at = overdue.min();
        }
        (due, self.looked_at)
    }

    /// What has no runtime of its own.
    pub(super) fn take_free(&mut self) -> Vec<(u64, Errand)> {
        self.take_if(|waiting| waiting.overdue.is_none())
    }

    fn take_if(&mut self, is_due: impl Fn(&Waiting) -> bool) -> Vec<(u64, Errand)> {
        let waiting = self.waiting.iter();
        let due = waiting.filter_map(|(id, waiting)| is_due(waiting).then_some(*id));
        let due: Vec<u64> = due.collect();
        let take = |id| Some((id, self.take(id)?));
        due.into_iter().filter_map(take).collect()
    }
}
