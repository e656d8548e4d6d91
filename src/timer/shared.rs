//! State shared by a timer and its tasks: the runtimes and the pending tasks.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::{runtime::Id, sync::Notify};

use super::{pending_task::PendingTasks, runtime_cache::RuntimeCache};
use crate::lock::lock;

/// How long a runtime has to do its work before another runtime takes over.
///
/// An unblocked thread polls each of its tasks sooner than this.
pub(super) const FAILOVER_DELAY: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct TimerShared {
    pub(super) cache: RuntimeCache,
    pub(super) wake: Notify,
    pub(super) state: Mutex<Runtimes>,
}

#[derive(Default)]
pub(super) struct Runtimes {
    /// The runtimes with a timer task.
    pub(super) entries: Vec<RuntimeEntry>,
    /// The runtime whose timer task handles deadlines on time.
    pub(super) leader: Option<Id>,
    pub(super) pending: PendingTasks,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RuntimeEntry {
    pub(super) runtime: Id,
    /// Whether the runtime can sleep. It cannot if it was built without `enable_time`, which only becomes apparent when it tries to.
    pub(super) can_sleep: bool,
}

// === impl TimerShared ===

impl TimerShared {
    pub(super) fn state(&self) -> MutexGuard<'_, Runtimes> {
        lock(&self.state)
    }
}

// === impl Runtimes ===

impl Runtimes {
    /// Adds a runtime. Returns `true` if it is new.
    pub(super) fn register(&mut self, runtime: Id) -> bool {
        if self.entries.iter().any(|entry| entry.runtime == runtime) {
            return false;
        }
        self.entries.push(RuntimeEntry {
            runtime,
            can_sleep: true,
        });
        true
    }

    pub(super) fn deregister(&mut self, runtime: Id) {
        self.entries.retain(|entry| entry.runtime != runtime);
        self.leader.take_if(|leader| *leader == runtime);
    }

    /// Makes this runtime the leader if it has a timer task and can sleep.
    pub(super) fn set_leader(&mut self, runtime: Id) {
        let mut entries = self.entries.iter();
        if entries.any(|entry| entry.runtime == runtime && entry.can_sleep) {
            self.leader = Some(runtime);
        }
    }

    /// Returns `true` if this runtime is the leader. If there is no leader, makes this runtime the leader, provided it can sleep.
    pub(super) fn is_or_becomes_leader(&mut self, runtime: Id) -> bool {
        if self.leader.is_none() {
            self.set_leader(runtime);
        }
        self.leader == Some(runtime)
    }

    /// Records that a runtime cannot sleep, and so cannot be the leader.
    pub(super) fn disable_sleep(&mut self, runtime: Id) {
        let mut entries = self.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.runtime == runtime) {
            entry.can_sleep = false;
        }
        self.leader.take_if(|leader| *leader == runtime);
    }
}
