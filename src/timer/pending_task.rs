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

/// The tasks that have not begun, or lost their runtime, those first that any runtime may take first.
#[derive(Default)]
pub(super) struct Errands {
    pub(super) waiting: BTreeMap<ErrandId, Errand>,
    added: u64,
    /// When the keepers look for what is overdue, if they were told to.
    looked_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ErrandId {
    /// When any runtime may take it. `None` if it has none of its own: at once.
    overdue: Option<Instant>,
    number: u64,
}

// === impl ErrandId ===

impl ErrandId {
    /// The same, once it has no runtime of its own.
    pub(super) fn free(self) -> Self {
        let overdue = None;
        Self { overdue, ..self }
    }
}

// === impl Errands ===

impl Errands {
    pub(super) fn add(&mut self, errand: Errand, overdue: Option<Instant>) -> ErrandId {
        self.added += 1;
        let number = self.added;
        let id = ErrandId { overdue, number };
        self.waiting.insert(id, errand);
        id
    }

    pub(super) fn take(&mut self, id: ErrandId) -> Option<Errand> {
        self.waiting.remove(&id)
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
    pub(super) fn take_due(&mut self, now: Instant) -> (Vec<(ErrandId, Errand)>, Option<Instant>) {
        let due = self.take_while(|id| id.overdue.is_none_or(|at| at <= now));
        if self.looked_at.is_none_or(|at| at <= now) {
            let next = self.waiting.first_key_value();
            self.looked_at = next.and_then(|(id, _)| id.overdue);
        }
        (due, self.looked_at)
    }

    /// What has no runtime of its own.
    pub(super) fn take_free(&mut self) -> Vec<(ErrandId, Errand)> {
        self.take_while(|id| id.overdue.is_none())
    }

    fn take_while(&mut self, is_due: impl Fn(&ErrandId) -> bool) -> Vec<(ErrandId, Errand)> {
        let mut taken = Vec::new();
        while let Some(first) = self.waiting.first_entry()
            && is_due(first.key())
        {
            taken.push(first.remove_entry());
        }
        taken
    }
}
