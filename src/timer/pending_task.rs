//! Tasks that another runtime takes over if their own runtime does not poll them.
//!
//! A pending task is stored in the timer. The spawned [`TaskRunner`](super::task_runner::TaskRunner) takes it when first polled, so no
//! task runs twice. If its runtime never polls the runner, another runtime takes the task.
//!
//! When a runner is dropped, it releases its task to the timer tasks of other runtimes, but at most
//! [`MAX_MIGRATIONS`](super::task_runner::MAX_MIGRATIONS) times. Otherwise, runtimes shutting down one after another could pass a task
//! along forever.

use std::{collections::BTreeMap, pin::Pin};

use tokio::time::Instant;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Until when a task can migrate to another runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Migration {
    /// Until it ends. The task must not await anything that belongs to a runtime.
    Always,
    /// Until it starts.
    BeforeStart,
}

pub(super) struct PendingTask {
    pub(super) migration: Migration,
    pub(super) task: Task,
    pub(super) migrations: u8,
}

/// Tasks that have not started yet or no longer have a runtime, ordered by takeover time.
#[derive(Default)]
pub(super) struct PendingTasks {
    pub(super) waiting: BTreeMap<TaskId, PendingTask>,
    last_number: u64,
    /// When the timer tasks next check for tasks to take over. `None` if they have not been woken for a task.
    wake_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaskId {
    /// When any runtime can take the task. `None` if the task has no runtime, so that any runtime can take it at once.
    takeover_at: Option<Instant>,
    number: u64,
}

// === impl TaskId ===

impl TaskId {
    /// Returns the id that the task gets once it no longer has a runtime.
    pub(super) fn without_runtime(self) -> Self {
        let takeover_at = None;
        Self {
            takeover_at,
            ..self
        }
    }
}

// === impl PendingTasks ===

impl PendingTasks {
    pub(super) fn add(&mut self, task: PendingTask, takeover_at: Option<Instant>) -> TaskId {
        self.last_number += 1;
        let number = self.last_number;
        let id = TaskId {
            takeover_at,
            number,
        };
        self.waiting.insert(id, task);
        id
    }

    pub(super) fn take(&mut self, id: TaskId) -> Option<PendingTask> {
        self.waiting.remove(&id)
    }

    /// Returns `true` if the timer tasks must be woken so that they check again at `takeover_at`.
    ///
    /// If so, records that they are being woken.
    pub(super) fn needs_wake(&mut self, takeover_at: Instant, now: Instant) -> bool {
        let is_earlier = self.wake_at.is_none_or(|at| at <= now || takeover_at < at);
        if is_earlier {
            self.wake_at = Some(takeover_at);
        }
        is_earlier
    }

    /// Takes the tasks that any runtime can run, and returns when to check again.
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

    /// Takes the tasks without a runtime.
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
