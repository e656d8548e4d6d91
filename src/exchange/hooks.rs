//! What happens when the token of an exchange fires: linked tokens fire with it, and clean-ups run.
//!
//! 1. A clean-up runs once, after a cancel only, on a task of its own: never inside `Drop`, and none harms
//!    another by a panic. Until it begins, another runtime may take it.
//! 2. One that comes after the cancel runs at once. One that comes after the end never runs.
//! 3. What has not run is dropped when the exchange has come to its end otherwise. Nothing that it owns waits for
//!    the end of the process.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
};

#[cfg(feature = "rmcp")]
use tokio_util::sync::CancellationToken;

use super::{Exchange, Registry};
use crate::{call::CancelReason, registry::Moves};

/// Something to be done once, when the token fires.
pub(super) enum Hook {
    #[cfg(feature = "rmcp")]
    Fire(CancellationToken),
    CleanUp(CleanUp),
}

type CleanUp = Box<dyn FnOnce(CancelReason) -> Cleaning + Send>;
type Cleaning = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What waits for the token of an exchange.
#[derive(Default)]
pub(super) enum Hooks {
    #[default]
    None,
    /// Nearly always the token of a handler. It needs no allocation.
    One(Hook),
    Several(Vec<Hook>),
    /// The exchange has come to its end: nothing will fire.
    Over,
}

// === impl Hooks ===

impl Hooks {
    /// Gives the hook back if it comes too late.
    fn add(&mut self, hook: Hook) -> Option<Hook> {
        match self {
            Self::None => *self = Self::One(hook),
            Self::One(_) => {
                *self = Self::Several(mem::take(self).into_iter().chain([hook]).collect())
            }
            Self::Several(hooks) => hooks.push(hook),
            Self::Over => return Some(hook),
        }
        None
    }

    pub(super) fn are_none(&self) -> bool {
        matches!(self, Self::None | Self::Over)
    }

    fn into_iter(self) -> impl Iterator<Item = Hook> {
        let (one, several) = match self {
            Self::None | Self::Over => (None, Vec::new()),
            Self::One(hook) => (Some(hook), Vec::new()),
            Self::Several(hooks) => (None, hooks),
        };
        one.into_iter().chain(several)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Has `clean_up` run when the token fires.
    pub(crate) fn on_cancel<F>(&self, clean_up: impl FnOnce(CancelReason) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.hook(Hook::CleanUp(Box::new(|reason| Box::pin(clean_up(reason)))));
    }

    /// Has `token` fire with the exchange's own.
    #[cfg(feature = "rmcp")]
    pub(crate) fn link(&self, token: CancellationToken) {
        self.hook(Hook::Fire(token));
    }

    fn hook(&self, hook: Hook) {
        let unwanted = {
            let mut state = self.state();
            // `fire` sets the reason before it looks for hooks: one of the two sees the other.
            match self.reason.get() {
                Some(_) => Some(hook),
                None => state.hooks.add(hook),
            }
        };
        match (unwanted, self.reason()) {
            (Some(hook), Some(reason)) => hook.run(reason, &self.instance.registry),
            (Some(hook), None) => hook.forget(),
            (None, _) => {}
        }
    }

    /// Goes through with a cancel. The reason is set.
    pub(super) fn fire_all(&self, reason: CancelReason) {
        let (token, hooks) = {
            let mut state = self.state();
            let hooks = mem::take(&mut state.hooks);
            (state.token.clone(), hooks)
        };
        if let Some(token) = token {
            token.cancel();
        }
        for hook in hooks.into_iter() {
            hook.run(reason, &self.instance.registry);
        }
    }

    /// Nothing will fire any more.
    pub(super) fn forget_hooks(&self) {
        let hooks = mem::replace(&mut self.state().hooks, Hooks::Over);
        hooks.into_iter().for_each(Hook::forget);
    }
}

// === impl Hook ===

impl Hook {
    fn run(self, reason: CancelReason, registry: &Arc<Registry>) {
        match self {
            #[cfg(feature = "rmcp")]
            Self::Fire(token) => token.cancel(),
            Self::CleanUp(clean_up) => {
                // Called on the task as well: a closure may do its work before it returns a future.
                let task = async move { clean_up(reason).await };
                // Once it has begun it may have to do with its runtime, and ends with that. Without a runtime the task
                // is dropped here.
                quietly(|| registry.spawn(Moves::BeforeItBegins, task));
            }
        }
    }

    fn forget(self) {
        quietly(|| drop(self));
    }
}

/// Runs what may call destructors of the user's. The caller may be in one itself.
fn quietly(action: impl FnOnce()) {
    let _panic = catch_unwind(AssertUnwindSafe(action));
}
