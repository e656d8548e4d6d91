//! An exchange's token, and the hooks that run when it fires: linked tokens and clean-ups.
//!
//! 1. The token fires at most once, and always for a reason: first the reason is set, then the token fires, then the hooks run.
//! 2. A clean-up runs at most once, and only after a cancellation. It runs on its own task, never inside `Drop`. A panic in one clean-up
//!    does not affect the others. Until a clean-up has started, it can be moved to another runtime.
//! 3. If the call has already been cancelled, a new clean-up runs at once. If it has ended in any other way, a new clean-up never runs.
//! 4. Once the token can no longer fire, for example because the call has completed, clean-ups are dropped to release what they own.
//! 5. No lock is held while a token fires, or while a clean-up is called or dropped.

use std::{
    mem,
    pin::Pin,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio_util::sync::CancellationToken;

use crate::{call::CancelReason, catch_panic::catch_panic, lock::lock};

/// Fires when a call is cancelled, or when the client of a non-MCP request disconnects.
#[derive(Default)]
pub(crate) struct Signal {
    reason: OnceLock<CancelReason>,
    /// Whether code outside the crate holds the token.
    is_observed: AtomicBool,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    token: Option<CancellationToken>,
    hooks: Hooks,
}

/// An action to run once, when the token fires.
pub(super) enum Hook {
    Fire(CancellationToken),
    CleanUp(CleanUp),
}

type CleanUp = Box<dyn FnOnce(CancelReason) -> CleanUpTask + Send>;

pub(super) type CleanUpTask = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Default)]
enum Hooks {
    #[default]
    None,
    /// Nearly always a handler's token, which is stored inline.
    One(Hook),
    Several(Vec<Hook>),
    /// The token can no longer fire, so a new hook never runs.
    Ended,
}

// === impl Signal ===

impl Signal {
    pub(crate) fn reason(&self) -> Option<CancelReason> {
        self.reason.get().copied()
    }

    /// Returns the token, creating it on first use. If the signal has fired, the token is cancelled.
    pub(crate) fn token(&self) -> CancellationToken {
        let token = self.pending().token.get_or_insert_default().clone();
        // `fire` sets the reason before it takes the lock, so either `fire` finds the token, or the reason is found here.
        if self.reason.get().is_some() {
            token.cancel();
        }
        token
    }

    /// Records that code outside the crate is getting the token and may observe a cancellation.
    pub(crate) fn mark_observed(&self) {
        self.is_observed.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if code outside the crate may observe a cancellation.
    pub(super) fn is_observed(&self) -> bool {
        if self.is_observed.load(Ordering::Relaxed) {
            return true;
        }
        let pending = self.pending();
        pending.token.is_some() || !pending.hooks.is_empty()
    }

    /// Adds a hook to run when the token fires.
    ///
    /// If the token has already fired, the hook runs at once. If the token can no longer fire, the hook is dropped.
    pub(super) fn add(&self, hook: Hook, spawn: impl Fn(CleanUpTask)) {
        let unwanted = {
            let mut pending = self.pending();
            // `fire` sets the reason before it takes the lock, so either `fire` finds the hook, or the reason is found here.
            match self.reason.get() {
                Some(_) => Some(hook),
                None => pending.hooks.add(hook),
            }
        };
        match (unwanted, self.reason()) {
            (Some(hook), Some(reason)) => hook.run(reason, &spawn),
            (Some(hook), None) => hook.discard(),
            (None, _) => {}
        }
    }

    /// Fires the token and runs the hooks. Only the first call has any effect.
    pub(super) fn fire(&self, reason: CancelReason, spawn: impl Fn(CleanUpTask)) {
        if self.reason.set(reason).is_err() {
            return;
        }
        let (token, hooks) = {
            let mut pending = self.pending();
            (pending.token.clone(), mem::take(&mut pending.hooks))
        };
        if let Some(token) = token {
            token.cancel();
        }
        for hook in hooks.into_iter() {
            hook.run(reason, &spawn);
        }
    }

    /// Drops the hooks, because the token will no longer fire.
    pub(super) fn disarm(&self) {
        let hooks = mem::replace(&mut self.pending().hooks, Hooks::Ended);
        hooks.into_iter().for_each(Hook::discard);
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        lock(&self.pending)
    }
}

// === impl Hooks ===

impl Hooks {
    /// Adds a hook, or returns it if the token can no longer fire.
    fn add(&mut self, hook: Hook) -> Option<Hook> {
        match self {
            Self::None => *self = Self::One(hook),
            Self::One(_) => {
                *self = Self::Several(mem::take(self).into_iter().chain([hook]).collect())
            }
            Self::Several(hooks) => hooks.push(hook),
            Self::Ended => return Some(hook),
        }
        None
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::None | Self::Ended)
    }

    fn into_iter(self) -> impl Iterator<Item = Hook> {
        let (one, several) = match self {
            Self::None | Self::Ended => (None, Vec::new()),
            Self::One(hook) => (Some(hook), Vec::new()),
            Self::Several(hooks) => (None, hooks),
        };
        one.into_iter().chain(several)
    }
}

// === impl Hook ===

impl Hook {
    pub(super) fn clean_up<F>(clean_up: impl FnOnce(CancelReason) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::CleanUp(Box::new(|reason| {
            // Call the closure on the task too, because it may do its work before it returns a future.
            Box::pin(async move { clean_up(reason).await })
        }))
    }

    fn run(self, reason: CancelReason, spawn: &impl Fn(CleanUpTask)) {
        match self {
            Self::Fire(token) => token.cancel(),
            // If there is no runtime, `spawn` drops the task.
            Self::CleanUp(clean_up) => drop(catch_panic(|| spawn(clean_up(reason)))),
        }
    }

    fn discard(self) {
        catch_panic(|| drop(self));
    }
}
