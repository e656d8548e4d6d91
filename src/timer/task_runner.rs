//! The task that runs an errand on a runtime.

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

/// How often a task may go on to another runtime: 8 times. Each of these took it over in vain.
pub(super) const MAX_MIGRATIONS: u8 = 8;

/// The task of a runtime that runs an errand.
pub(super) struct TaskRunner {
    shared: Arc<TimerShared>,
    id: TaskId,
    stage: Stage,
}

enum Stage {
    /// The timer has the errand, unless another runtime took it.
    Pending,
    /// It was taken over from another runtime.
    Stolen(PendingTask),
    Running(PendingTask),
    /// It has ended, or is being polled: if that panics it is over too.
    Done,
}

// === impl Runner ===

impl TaskRunner {
    /// Has an errand run on the current runtime, or on another one.
    pub(super) fn start(shared: &Arc<TimerShared>, errand: PendingTask) {
        let here = Handle::try_current().ok();
        let now = Instant::now();
        let overdue = here.as_ref().and_then(|_| now.checked_add(FAILOVER_DELAY));
        let (id, others) = {
            let mut state = shared.state();
            if here.is_none() && state.entries.is_empty() {
                // Nobody can run it. It may be the user's, so it is dropped without the lock.
                drop(state);
                return drop(errand);
            }
            let id = state.pending.add(errand, overdue);
            let here = here.as_ref().map(Handle::id);
            let mut keepers = state.entries.iter();
            let others = keepers.any(|member| Some(member.runtime) != here)
                && overdue.is_none_or(|at| state.pending.needs_wake(at, now));
            (id, others)
        };
        if others {
            shared.wake.notify_waiters();
        }
        if let Some(here) = here {
            drop(here.spawn(Self::new(shared, id, Stage::Pending)));
        }
    }

    /// Has errands of other runtimes run on the current one. `false` if this one takes no tasks any more.
    pub(super) fn steal(shared: &Arc<TimerShared>, errands: Vec<(TaskId, PendingTask)>) -> bool {
        let mut goes_on = true;
        for (id, errand) in errands {
            let runner = Self::new(shared, id, Stage::Stolen(errand));
            match Handle::try_current() {
                Ok(here) if goes_on => drop(here.spawn(runner)),
                // Dropped, it leaves its errand to yet another runtime.
                Ok(_) | Err(_) => drop(runner),
            }
            goes_on &= !shared
                .state()
                .pending
                .waiting
                .contains_key(&id.without_runtime());
        }
        goes_on
    }

    fn new(shared: &Arc<TimerShared>, id: TaskId, stage: Stage) -> Self {
        Self {
            shared: shared.clone(),
            id,
            stage,
        }
    }

    /// Leaves an errand to the other runtimes, if there are any and it can go on.
    fn release(&self, mut errand: PendingTask) {
        errand.migrations += 1;
        let mut state = self.shared.state();
        if errand.migrations > MAX_MIGRATIONS || state.entries.is_empty() {
            drop(state);
            return drop(errand);
        }
        state
            .pending
            .waiting
            .insert(self.id.without_runtime(), errand);
        drop(state);
        self.shared.wake.notify_waiters();
    }
}

impl Future for TaskRunner {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let errand = match mem::replace(&mut self.stage, Stage::Done) {
            Stage::Pending => self.shared.state().pending.take(self.id),
            Stage::Stolen(errand) | Stage::Running(errand) => Some(errand),
            Stage::Done => None,
        };
        let Some(mut errand) = errand else {
            return Poll::Ready(());
        };
        let polled = errand.task.as_mut().poll(cx);
        if polled.is_pending() {
            self.stage = Stage::Running(errand);
        }
        polled
    }
}

impl Drop for TaskRunner {
    fn drop(&mut self) {
        let errand = match mem::replace(&mut self.stage, Stage::Done) {
            // Its own runtime has ended, or another one was faster.
            Stage::Pending => self.shared.state().pending.take(self.id),
            Stage::Stolen(errand) => Some(errand),
            Stage::Running(errand) => (errand.migration == Migration::Always).then_some(errand),
            Stage::Done => None,
        };
        if let Some(errand) = errand {
            self.release(errand);
        }
    }
}
