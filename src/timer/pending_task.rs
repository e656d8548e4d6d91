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
pub(crate) enum Migration {
    /// Until it ends. It waits for nothing that belongs to a runtime.
    Always,
    /// Until it begins.
    BeforeStart,
}

pub(super) struct PendingTask {
    pub(super) migration: Migration,
    pub(super) task: Task,
    pub(super) migrations: u8,
}

/// The tasks that have not begun, or lost their runtime, those first that any runtime may take first.
#[derive(Default)]
pub(super) struct PendingTasks {
    pub(super) waiting: BTreeMap<TaskId, PendingTask>,
    last_number: u64,
    /// When the keepers look for what is overdue, if they were told to.
    wake_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaskId {
    /// When any runtime may take it. `None` if it has none of its own: at once.
    takeover_at: Option<Instant>,
    number: u64,
}

// === impl ErrandId ===

impl TaskId {
    /// The same, once it has no runtime of its own.
    pub(super) fn without_runtime(self) -> Self {
        let overdue = None;
        Self {
            takeover_at: overdue,
            ..self
        }
    }
}

// === impl Errands ===

impl PendingTasks {
    pub(super) fn add(&mut self, errand: PendingTask, overdue: Option<Instant>) -> TaskId {
        self.last_number += 1;
        let number = self.last_number;
        let id = TaskId {
            takeover_at: overdue,
            number,
        };
        self.waiting.insert(id, errand);
        id
    }

    pub(super) fn take(&mut self, id: TaskId) -> Option<PendingTask> {
        self.waiting.remove(&id)
    }

    /// Whether the keepers must be told that they are to look at this time.
    pub(super) fn needs_wake(&mut self, overdue: Instant, now: Instant) -> bool {
        let is_news = self.wake_at.is_none_or(|at| at <= now || overdue < at);
        if is_news {
            self.wake_at = Some(overdue);
        }
        is_news
    }

    /// What any runtime may take, and when to look again.
    pub(super) fn take_overdue(
        &mut self,
        now: Instant,
    ) -> (Vec<(TaskId, PendingTask)>, Option<Instant>) {
        let due = self.take_while(|id| id.takeover_at.is_none_or(|at| at <= now));
        if self.wake_at.is_none_or(|at| at <= now) {
            let next = self.waiting.first_key_value();
            self.wake_at = next.and_then(|(id, _)| id.takeover_at);
        }
        (due, self.wake_at)
    }

    /// What has no runtime of its own.
    pub(super) fn take_without_runtime(&mut self) -> Vec<(TaskId, PendingTask)> {
        self.take_while(|id| id.takeover_at.is_none())
    }

    fn take_while(&mut self, is_due: impl Fn(&TaskId) -> bool) -> Vec<(TaskId, PendingTask)> {
        let mut taken = Vec::new();
        while let Some(first) = self.waiting.first_entry()
            && is_due(first.key())
        {
            taken.push(first.remove_entry());
        }
        taken
    }
}
