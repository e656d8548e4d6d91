//! How each instance reaches the directory.
//!
//! A request reaches the directory after a delay and is executed there in a single step, whether or not the instance is still waiting. Its
//! reply arrives after another delay. All that the link sees of a request is its name, so it does not depend on the operations that a
//! directory has.

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
    faulty::{ErasedRequest, Gate},
};

/// Requests that a directory refuses when it is out of memory.
const WRITES: [&str; 4] = ["register", "claim", "acquire_lease", "keep_answer"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkState {
    Up,
    /// The directory refuses connections.
    Refused,
    /// The directory is stalled. It executes the queued requests when it resumes.
    Stalled,
    /// Each request takes this long.
    Slow(Ms),
}

/// All instances' links to the directory. Clones share them.
#[derive(Clone)]
pub(super) struct DirectoryLink {
    post: Post,
    world: Handle,
    state: Arc<Mutex<State>>,
}

struct State {
    dice: Dice,
    common: LinkState,
    by_machine: HashMap<Machine, LinkState>,
    has_no_memory: bool,
    /// Requests that reached the directory while it was stalled.
    queued: Vec<Box<dyn FnOnce() + Send>>,
}

struct InstanceLink {
    directory_link: DirectoryLink,
    host: HostId,
    machine: Machine,
}

// === impl DirectoryLink ===

impl DirectoryLink {
    pub(super) fn new(post: Post, world: Handle, dice: Dice) -> Self {
        let state = State {
            dice,
            common: LinkState::Up,
            by_machine: HashMap::new(),
            has_no_memory: false,
            queued: Vec::new(),
        };
        Self {
            post,
            world,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Returns a process's link to the directory.
    pub(super) fn of_instance(&self, host: HostId, machine: Machine) -> impl Gate + use<> {
        InstanceLink {
            directory_link: self.clone(),
            host,
            machine,
        }
    }

    /// Sets the state of all links, and executes what is queued unless the directory is stalled.
    pub(super) fn set_all(&self, link_state: LinkState) {
        let queued = {
            let mut state = self.state();
            state.common = link_state;
            if link_state == LinkState::Stalled {
                return;
            }
            std::mem::take(&mut state.queued)
        };
        for request in queued {
            self.post.after(WORLD, 1, request);
        }
    }

    pub(super) fn set(&self, machine: Machine, link_state: LinkState) {
        self.state().by_machine.insert(machine, link_state);
    }

    pub(super) fn set_no_memory(&self, has_no_memory: bool) {
        self.state().has_no_memory = has_no_memory;
    }

    /// Returns the state of a machine's link. The common state takes precedence, unless it is [`LinkState::Up`].
    fn link_state(&self, machine: Machine) -> LinkState {
        let state = self.state();
        match state.common {
            LinkState::Up => state
                .by_machine
                .get(&machine)
                .copied()
                .unwrap_or(LinkState::Up),
            link_state => link_state,
        }
    }

    fn is_stalled(&self) -> bool {
        self.state().common == LinkState::Stalled
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Executes a request at the directory and sends its reply, or queues the request if the directory is stalled.
    fn execute(
        self,
        command: &'static str,
        request: ErasedRequest,
        host: HostId,
        reply_delay: Ms,
        reply_sender: oneshot::Sender<<ErasedRequest as Future>::Output>,
    ) {
        if self.is_stalled() {
            let directory_link = self.clone();
            let execute_later =
                move || directory_link.execute(command, request, host, reply_delay, reply_sender);
            self.state().queued.push(Box::new(execute_later));
            return;
        }
        let is_refused = self.state().has_no_memory && WRITES.contains(&command);
        let reply = if is_refused {
            Err(DirectoryError::failed("out of memory"))
        } else {
            let _inside = self.world.enter();
            let reply = request.now_or_never();
            reply.expect("an in-memory directory never waits")
        };
        self.post.after(host, reply_delay, move || {
            // The instance may have stopped waiting.
            let _ = reply_sender.send(reply);
        });
    }
}

// === impl InstanceLink ===

impl Gate for InstanceLink {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let Self {
            directory_link,
            host,
            machine,
        } = self;
        let (directory_link, host, machine) = (directory_link.clone(), *host, *machine);
        Box::pin(async move {
            let (request_delay, reply_delay) = match directory_link.link_state(machine) {
                LinkState::Refused => {
                    directory_link.post.pause(host, 1).await;
                    return Err(DirectoryError::failed("connection refused"));
                }
                LinkState::Slow(time) => (time / 2, time - time / 2),
                LinkState::Up | LinkState::Stalled => {
                    (1, 1 + directory_link.state().dice.roll() % 2)
                }
            };
            let (reply_sender, reply_receiver) = oneshot::channel();
            let link = directory_link.clone();
            directory_link.post.after(WORLD, request_delay, move || {
                link.execute(command, request, host, reply_delay, reply_sender);
            });
            let broken = |_| Err(DirectoryError::failed("the connection broke"));
            reply_receiver.await.unwrap_or_else(broken)
        })
    }
}

impl fmt::Debug for InstanceLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstanceLink").finish_non_exhaustive()
    }
}
