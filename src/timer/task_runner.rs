//! The task that runs an errand on a runtime.

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::{runtime::Handle, time::Instant};

use super::{
    errand::{Errand, ErrandId, Moves},
    shared::{Keepers, SLACK},
};

/// How often a task may go on to another runtime: 8 times. Each of these took it over in vain.
pub(super) const MAX_MOVES: u8 = 8;

/// The task of a runtime that runs an errand.
pub(super) struct Runner {
    shared: Arc<Keepers>,
    id: ErrandId,
    stage: Stage,
}

enum Stage {
    /// The timer has the errand, unless another runtime took it.
    ToBegin,
    /// It was taken over from another runtime.
    Taken(Errand),
    Begun(Errand),
    /// It has ended, or is being polled: if that panics it is over too.
    Over,
}

// === impl Runner ===

impl Runner {
    /// Has an errand run on the current runtime, or on another one.
    pub(super) fn start(shared: &Arc<Keepers>, errand: Errand) {
        let here = Handle::try_current().ok();
        let now = Instant::now();
        let overdue = here.as_ref().and_then(|_| now.checked_add(SLACK));
        let (id, others) = {
            let mut state = shared.state();
            if here.is_none() && state.keepers.is_empty() {
                // Nobody can run it. It may be the user's, so it is dropped without the lock.
                drop(state);
                return drop(errand);
            }
            let id = state.errands.add(errand, overdue);
            let here = here.as_ref().map(Handle::id);
            let mut keepers = state.keepers.iter();
            let others = keepers.any(|member| Some(member.runtime) != here)
                && overdue.is_none_or(|at| state.errands.must_tell(at, now));
            (id, others)
        };
        if others {
            shared.wake.notify_waiters();
        }
        if let Some(here) = here {
            drop(here.spawn(Self::new(shared, id, Stage::ToBegin)));
        }
    }

    /// Has errands of other runtimes run on the current one. `false` if this one takes no tasks any more.
    pub(super) fn take_over(shared: &Arc<Keepers>, errands: Vec<(ErrandId, Errand)>) -> bool {
        let mut goes_on = true;
        for (id, errand) in errands {
            let runner = Self::new(shared, id, Stage::Taken(errand));
            match Handle::try_current() {
                Ok(here) if goes_on => drop(here.spawn(runner)),
                // Dropped, it leaves its errand to yet another runtime.
                Ok(_) | Err(_) => drop(runner),
            }
            goes_on &= !shared.state().errands.waiting.contains_key(&id.free());
        }
        goes_on
    }

    fn new(shared: &Arc<Keepers>, id: ErrandId, stage: Stage) -> Self {
        Self {
            shared: shared.clone(),
            id,
            stage,
        }
    }

    /// Leaves an errand to the other runtimes, if there are any and it can go on.
    fn leave(&self, mut errand: Errand) {
        errand.moved += 1;
        let mut state = self.shared.state();
        if errand.moved > MAX_MOVES || state.keepers.is_empty() {
            drop(state);
            return drop(errand);
        }
        state.errands.waiting.insert(self.id.free(), errand);
        drop(state);
        self.shared.wake.notify_waiters();
    }
}

impl Future for Runner {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let errand = match mem::replace(&mut self.stage, Stage::Over) {
            Stage::ToBegin => self.shared.state().errands.take(self.id),
            Stage::Taken(errand) | Stage::Begun(errand) => Some(errand),
            Stage::Over => None,
        };
        let Some(mut errand) = errand else {
            return Poll::Ready(());
        };
        let polled = errand.task.as_mut().poll(cx);
        if polled.is_pending() {
            self.stage = Stage::Begun(errand);
        }
        polled
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let errand = match mem::replace(&mut self.stage, Stage::Over) {
            // Its own runtime has ended, or another one was faster.
            Stage::ToBegin => self.shared.state().errands.take(self.id),
            Stage::Taken(errand) => Some(errand),
            Stage::Begun(errand) => (errand.moves == Moves::Always).then_some(errand),
            Stage::Over => None,
        };
        if let Some(errand) = errand {
            self.leave(errand);
        }
    }
}
