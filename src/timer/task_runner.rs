//! The spawned task that runs a pending task on a runtime.

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::{runtime::Handle, time::Instant};

use super::{
    pending_task::{Migration, PendingTask, TaskId},
    shared::{FAILOVER_DELAY, TimerShared},
};

/// Maximum number of times a task migrates because its runtime has ended.
pub(super) const MAX_MIGRATIONS: u8 = 8;

/// Runs a pending task on the runtime that it was spawned on.
pub(super) struct TaskRunner {
    shared: Arc<TimerShared>,
    id: TaskId,
    stage: Stage,
}

enum Stage {
    /// The task is stored in the timer, unless another runtime has taken it.
    Pending,
    /// The task has been stolen from another runtime.
    Stolen(PendingTask),
    Running(PendingTask),
    /// The task has ended or is being polled. Set during a poll, so that a panicked task is not polled again.
    Done,
}

// === impl TaskRunner ===

impl TaskRunner {
    /// Runs a task on the current runtime, or on another one. Drops the task if there is no runtime.
    pub(super) fn start(shared: &Arc<TimerShared>, task: PendingTask) {
        let current = Handle::try_current().ok();
        let now = Instant::now();
        let takeover_at = current
            .as_ref()
            .and_then(|_| now.checked_add(FAILOVER_DELAY));
        let (id, wakes_others) = {
            let mut state = shared.state();
            if current.is_none() && state.entries.is_empty() {
                // No runtime can run the task. It is dropped without holding the lock, because its destructor may run user code.
                drop(state);
                return drop(task);
            }
            let id = state.pending.add(task, takeover_at);
            let current = current.as_ref().map(Handle::id);
            let mut entries = state.entries.iter();
            let wakes_others = entries.any(|entry| Some(entry.runtime) != current)
                && takeover_at.is_none_or(|at| state.pending.needs_wake(at, now));
            (id, wakes_others)
        };
        if wakes_others {
            shared.wake.notify_waiters();
        }
        if let Some(current) = current {
            drop(current.spawn(Self::new(shared, id, Stage::Pending)));
        }
    }

    /// Runs other runtimes' tasks on the current runtime. Returns `false` if it is shutting down.
    pub(super) fn steal(shared: &Arc<TimerShared>, tasks: Vec<(TaskId, PendingTask)>) -> bool {
        let mut is_running = true;
        for (id, task) in tasks {
            let runner = Self::new(shared, id, Stage::Stolen(task));
            match Handle::try_current() {
                Ok(current) if is_running => drop(current.spawn(runner)),
                // Dropping the runner releases the task to yet another runtime.
                Ok(_) | Err(_) => drop(runner),
            }
            // A runtime that is shutting down drops the runner at once, which releases the task.
            is_running &= !shared
                .state()
                .pending
                .waiting
                .contains_key(&id.without_runtime());
        }
        is_running
    }

    fn new(shared: &Arc<TimerShared>, id: TaskId, stage: Stage) -> Self {
        Self {
            shared: shared.clone(),
            id,
            stage,
        }
    }

    /// Releases a task to the other runtimes. Drops it if there are none, or after [`MAX_MIGRATIONS`].
    fn release(&self, mut task: PendingTask) {
        task.migrations += 1;
        let mut state = self.shared.state();
        if task.migrations > MAX_MIGRATIONS || state.entries.is_empty() {
            drop(state);
            return drop(task);
        }
        state
            .pending
            .waiting
            .insert(self.id.without_runtime(), task);
        drop(state);
        self.shared.wake.notify_waiters();
    }
}

impl Future for TaskRunner {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let task = match mem::replace(&mut self.stage, Stage::Done) {
            Stage::Pending => self.shared.state().pending.take(self.id),
            Stage::Stolen(task) | Stage::Running(task) => Some(task),
            Stage::Done => None,
        };
        let Some(mut task) = task else {
            return Poll::Ready(());
        };
        let polled = task.task.as_mut().poll(cx);
        if polled.is_pending() {
            self.stage = Stage::Running(task);
        }
        polled
    }
}

impl Drop for TaskRunner {
    fn drop(&mut self) {
        let task = match mem::replace(&mut self.stage, Stage::Done) {
            // The runtime has ended, or another one has taken the task.
            Stage::Pending => self.shared.state().pending.take(self.id),
            Stage::Stolen(task) => Some(task),
            Stage::Running(task) => (task.migration == Migration::Always).then_some(task),
            Stage::Done => None,
        };
        if let Some(task) = task {
            self.release(task);
        }
    }
}
