//! The state that a timer shares with its tasks: the runtimes that keep time, and the tasks that wait for one.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::{runtime::Id, sync::Notify};

use super::{pending_task::PendingTasks, runtime_cache::RuntimeCache};
use crate::lock::lock;

/// How long a runtime has to do its own work before another one does it: 100 ms. A thread that polls its tasks as it
/// should comes to each of them sooner.
pub(super) const FAILOVER_DELAY: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct TimerShared {
    pub(super) cache: RuntimeCache,
    pub(super) wake: Notify,
    pub(super) state: Mutex<Runtimes>,
}

#[derive(Default)]
pub(super) struct Runtimes {
    /// The runtimes that keep time.
    pub(super) entries: Vec<RuntimeEntry>,
    /// The one whose keeper looks on time.
    pub(super) leader: Option<Id>,
    pub(super) pending: PendingTasks,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RuntimeEntry {
    pub(super) runtime: Id,
    /// False if it was built without `enable_time`.
    pub(super) can_sleep: bool,
}

// === impl Keepers ===

impl TimerShared {
    pub(super) fn state(&self) -> MutexGuard<'_, Runtimes> {
        lock(&self.state)
    }
}

// === impl Roster ===

impl Runtimes {
    /// Adds a keeper. Says whether its runtime was not known.
    pub(super) fn register(&mut self, runtime: Id) -> bool {
        if self.entries.iter().any(|member| member.runtime == runtime) {
            return false;
        }
        self.entries.push(RuntimeEntry {
            runtime,
            can_sleep: true,
        });
        true
    }

    pub(super) fn deregister(&mut self, runtime: Id) {
        self.entries.retain(|member| member.runtime != runtime);
        self.leader.take_if(|first| *first == runtime);
    }

    /// Makes the keeper of this runtime the first, if it can sleep.
    pub(super) fn set_leader(&mut self, runtime: Id) {
        let mut keepers = self.entries.iter();
        if keepers.any(|member| member.runtime == runtime && member.can_sleep) {
            self.leader = Some(runtime);
        }
    }

    /// Says whether the keeper of this runtime is the first. It becomes that if none is.
    pub(super) fn is_or_becomes_leader(&mut self, runtime: Id) -> bool {
        if self.leader.is_none() {
            self.set_leader(runtime);
        }
        self.leader == Some(runtime)
    }

    pub(super) fn disable_sleep(&mut self, runtime: Id) {
        let mut keepers = self.entries.iter_mut();
        if let Some(member) = keepers.find(|member| member.runtime == runtime) {
            member.can_sleep = false;
        }
        self.leader.take_if(|first| *first == runtime);
    }
}
