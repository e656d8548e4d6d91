//! The state that a timer shares with its tasks: the runtimes that keep time, and the tasks that wait for one.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::{runtime::Id, sync::Notify};

use super::{errand::Errands, roll::Roll};
use crate::lock::lock;

/// How long a runtime has to do its own work before another one does it: 100 ms. A thread that polls its tasks as it
/// should comes to each of them sooner.
pub(super) const SLACK: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Keepers {
    pub(super) roll: Roll,
    pub(super) wake: Notify,
    pub(super) state: Mutex<Roster>,
}

#[derive(Default)]
pub(super) struct Roster {
    /// The runtimes that keep time.
    pub(super) keepers: Vec<Member>,
    /// The one whose keeper looks on time.
    pub(super) first: Option<Id>,
    pub(super) errands: Errands,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub(super) runtime: Id,
    /// False if it was built without `enable_time`.
    pub(super) can_sleep: bool,
}

// === impl Keepers ===

impl Keepers {
    pub(super) fn state(&self) -> MutexGuard<'_, Roster> {
        lock(&self.state)
    }
}

// === impl Roster ===

impl Roster {
    /// Adds a keeper. Says whether its runtime was not known.
    pub(super) fn enter(&mut self, runtime: Id) -> bool {
        if self.keepers.iter().any(|member| member.runtime == runtime) {
            return false;
        }
        self.keepers.push(Member {
            runtime,
            can_sleep: true,
        });
        true
    }

    pub(super) fn leave(&mut self, runtime: Id) {
        self.keepers.retain(|member| member.runtime != runtime);
        self.first.take_if(|first| *first == runtime);
    }

    /// Makes the keeper of this runtime the first, if it can sleep.
    pub(super) fn prefer(&mut self, runtime: Id) {
        let mut keepers = self.keepers.iter();
        if keepers.any(|member| member.runtime == runtime && member.can_sleep) {
            self.first = Some(runtime);
        }
    }

    /// Says whether the keeper of this runtime is the first. It becomes that if none is.
    pub(super) fn is_first(&mut self, runtime: Id) -> bool {
        if self.first.is_none() {
            self.prefer(runtime);
        }
        self.first == Some(runtime)
    }

    pub(super) fn cannot_sleep(&mut self, runtime: Id) {
        let mut keepers = self.keepers.iter_mut();
        if let Some(member) = keepers.find(|member| member.runtime == runtime) {
            member.can_sleep = false;
        }
        self.first.take_if(|first| *first == runtime);
    }
}
