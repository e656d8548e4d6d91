//! How each instance reaches the directory.
//!
//! A request travels to the directory, is done there in one go, whether or not its instance still waits for it, and its answer
//! travels back. It does not depend on what can be asked of a directory: it has the name of each request, and no more.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::FutureExt as _;
use test_support::Dice;
use tokio::{runtime::Handle, sync::oneshot};

use super::{
    net::Machine,
    time::{HostId, Ms, Post, WORLD},
};
use crate::directory::{
    DirectoryError,
    faulty::{Gate, Work},
};

/// Requests that a directory without memory refuses.
const WRITES: [&str; 5] = ["register", "claim", "lease", "knock", "keep_answer"];

/// How the directory is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sky {
    Clear,
    /// It refuses connections.
    Away,
    /// It stands still. What was asked is done when it goes on.
    Frozen,
    /// Each request takes so long.
    Slow(Ms),
}

/// How all instances reach the directory. Clones are the same.
#[derive(Clone)]
pub(super) struct Weather {
    post: Post,
    world: Handle,
    state: Arc<Mutex<State>>,
}

struct State {
    dice: Dice,
    over_all: Sky,
    over: HashMap<Machine, Sky>,
    has_no_memory: bool,
    /// What was asked of a directory that stands still.
    held: Vec<Box<dyn FnOnce() + Send>>,
}

struct Way {
    weather: Weather,
    host: HostId,
    machine: Machine,
}

// === impl Weather ===

impl Weather {
    pub(super) fn new(post: Post, world: Handle, dice: Dice) -> Self {
        let state = State {
            dice,
            over_all: Sky::Clear,
            over: HashMap::new(),
            has_no_memory: false,
            held: Vec::new(),
        };
        Self {
            post,
            world,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// The way of a process to the directory.
    pub(super) fn way(&self, host: HostId, machine: Machine) -> impl Gate + use<> {
        Way {
            weather: self.clone(),
            host,
            machine,
        }
    }

    pub(super) fn set_all(&self, sky: Sky) {
        let held = {
            let mut state = self.state();
            state.over_all = sky;
            if sky == Sky::Frozen {
                return;
            }
            std::mem::take(&mut state.held)
        };
        for work in held {
            self.post.after(WORLD, 1, work);
        }
    }

    pub(super) fn set(&self, machine: Machine, sky: Sky) {
        self.state().over.insert(machine, sky);
    }

    pub(super) fn set_no_memory(&self, has_no_memory: bool) {
        self.state().has_no_memory = has_no_memory;
    }

    fn sky(&self, machine: Machine) -> Sky {
        let state = self.state();
        match state.over_all {
            Sky::Clear => state.over.get(&machine).copied().unwrap_or(Sky::Clear),
            sky => sky,
        }
    }

    fn is_frozen(&self) -> bool {
        self.state().over_all == Sky::Frozen
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Does the work of a request at the directory, and has its answer travel back.
    fn arrives(
        self,
        what: &'static str,
        work: Work,
        host: HostId,
        back: Ms,
        answer: oneshot::Sender<<Work as Future>::Output>,
    ) {
        if self.is_frozen() {
            let weather = self.clone();
            let later = move || weather.arrives(what, work, host, back, answer);
            self.state().held.push(Box::new(later));
            return;
        }
        let is_refused = self.state().has_no_memory && WRITES.contains(&what);
        let done = if is_refused {
            Err(DirectoryError::failed("it has no memory left"))
        } else {
            let _there = self.world.enter();
            let done = work.now_or_never();
            done.expect("a directory in memory waits for nothing")
        };
        self.post.after(host, back, move || {
            // The instance may not wait any more.
            let _answered = answer.send(done);
        });
    }
}

// === impl Way ===

impl Gate for Way {
    fn pass(&self, what: &'static str, work: Work) -> Work {
        let Self {
            weather,
            host,
            machine,
        } = self;
        let (weather, host, machine) = (weather.clone(), *host, *machine);
        Box::pin(async move {
            let (there, back) = match weather.sky(machine) {
                Sky::Away => {
                    weather.post.pause(host, 1).await;
                    return Err(DirectoryError::failed("it is away"));
                }
                Sky::Slow(time) => (time / 2, time - time / 2),
                Sky::Clear | Sky::Frozen => (1, 1 + weather.state().dice.roll() % 2),
            };
            let (answer, answered) = oneshot::channel();
            let at = weather.clone();
            weather.post.after(WORLD, there, move || {
                at.arrives(what, work, host, back, answer);
            });
            let lost = |_| Err(DirectoryError::failed("the connection broke"));
            answered.await.unwrap_or_else(lost)
        })
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way").finish_non_exhaustive()
    }
}
