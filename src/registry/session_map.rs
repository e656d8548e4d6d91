//! The homes of all sessions. A call lives in its session: the session's home is its core, behind a lock of its own.
//!
//! A home belongs to a session id. It stays the same when it turns out who gave out that id, so a call never moves. Two ids meet
//! at a lock only for the moment in which a home is looked for.

use std::{
    collections::hash_map,
    iter,
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak},
};

use tokio::{sync::Notify, time::Instant};

use super::{
    answer::Answer,
    core::{self, Entry, Expired, KeyHash, PrehashedMap, RegistryShared, ShrinkIfSparse},
    tracked::Tracked,
};
use crate::{
    call::{CallId, CancelReason},
    catch_panic::catch_panic,
    lock::lock,
    shards::Shards,
    timer::{LatenessTracker, OnDeadline, Rearm, Timeliness, Timer, TimerHandle},
};

/// In how many homes calls without a session live: 16, so that as many may come and go at the same time.
const SESSIONLESS_SHARDS: usize = 16;

/// How much of what is due in a home is done at a time: 16 calls, and as many records of ended ones of each rank. Then its
/// lock is free.
pub(super) const EXPIRY_BATCH: usize = 16;

/// At how many calls one looks while a home is locked: 256, which takes about a tenth of a millisecond.
pub(super) const SCAN_BATCH: usize = 256;

pub(crate) type Core<T> = core::SessionState<Arc<T>, Answer>;

pub(crate) type Untracked<T> = core::Untracked<Arc<T>>;

pub(crate) struct SessionMap<T> {
    shards: Shards<Mutex<Shard<T>>>,
    sessionless: [Arc<SessionEntry<T>>; SESSIONLESS_SHARDS],
    pub(super) common: Arc<RegistryShared>,
    pub(super) timer: Arc<Timer>,
    /// Notified when calls have ended while that is counted.
    pub(super) ended: Notify,
}

type Shard<T> = PrehashedMap<Arc<SessionEntry<T>>>;

pub(crate) struct SessionEntry<T> {
    map: Weak<SessionMap<T>>,
    /// The session id and its hash. `None` if its calls have no session.
    session_id: Option<(Arc<str>, KeyHash)>,
    state: Mutex<EntryState<T>>,
    /// Has the timer look at it, once anything of it came to have a time.
    timer: OnceLock<TimerHandle>,
}

struct EntryState<T> {
    core: Core<T>,
    /// When the timer looks at it, if it does.
    timer_deadline: Option<Instant>,
    /// Nothing was known of its session, and nobody finds it any more: the session has another home, or none.
    is_removed: bool,
}

/// What an operation on a home leaves to be done once nothing is locked.
#[must_use]
pub(crate) struct DeferredEffects<T> {
    entry: Arc<SessionEntry<T>>,
    effects: Effects,
}

struct Effects {
    /// There is an earlier deadline than the timer knows.
    earlier_deadline: Option<Instant>,
    /// Somebody waits for calls to end, and one has.
    has_completed: bool,
    is_empty: bool,
}

// === impl Street ===

impl<T: Tracked> SessionMap<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new_cyclic(|street| {
            let common = Arc::new(RegistryShared::default());
            let lone = || Arc::new(SessionEntry::new(street.clone(), common.clone(), None));
            Self {
                shards: Shards::default(),
                sessionless: [(); SESSIONLESS_SHARDS].map(|()| lone()),
                common,
                timer: Arc::new(Timer::new()),
                ended: Notify::new(),
            }
        })
    }

    /// The home of a session id of which something is known.
    pub(super) fn find(&self, session_id: &str) -> Option<Arc<SessionEntry<T>>> {
        let hash = self.common.hasher.session_id(session_id);
        let shard = self.shard(hash);
        let home = shard.get(&hash).filter(|home| home.has_id(session_id))?;
        Some(home.clone())
    }

    /// Runs one operation in the home of a session id, which is built if there is none. What is left to be done comes
    /// back: nothing else is locked then.
    ///
    /// If another id has its hash, its calls and those of this one could not be told apart: then they live where
    /// calls without a session do.
    pub(super) fn with_or_insert<R>(
        self: &Arc<Self>,
        session_id: Option<&Arc<str>>,
        id: CallId,
        operation: impl FnOnce(&Arc<SessionEntry<T>>, &mut Core<T>) -> R,
    ) -> (R, DeferredEffects<T>) {
        loop {
            let home = session_id.and_then(|session_id| self.find_or_insert(session_id));
            let home = home.unwrap_or_else(|| self.sessionless(id).clone());
            let mut state = home.state();
            // Else it left the street meanwhile.
            if !state.is_removed {
                let (result, after) = state.run(|core| operation(&home, core));
                drop(state);
                return (
                    result,
                    DeferredEffects {
                        entry: home,
                        effects: after,
                    },
                );
            }
        }
    }

    /// Where calls without a session live.
    fn sessionless(&self, id: CallId) -> &Arc<SessionEntry<T>> {
        let at = u64::from(id) as usize % SESSIONLESS_SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        &self.sessionless[at]
    }

    fn find_or_insert(self: &Arc<Self>, session_id: &Arc<str>) -> Option<Arc<SessionEntry<T>>> {
        let hash = self.common.hasher.session_id(session_id);
        match self.shard(hash).entry(hash) {
            hash_map::Entry::Occupied(home) if !home.get().has_id(session_id) => None,
            hash_map::Entry::Occupied(home) => Some(home.get().clone()),
            hash_map::Entry::Vacant(vacant) => {
                let street = Arc::downgrade(self);
                let session_id = Some((session_id.clone(), hash));
                let home = SessionEntry::new(street, self.common.clone(), session_id);
                Some(vacant.insert(Arc::new(home)).clone())
            }
        }
    }

    /// Removes a home of whose session nothing is known. Here alone a home is locked while its shard is.
    fn remove_if_empty(&self, home: &SessionEntry<T>) {
        let Some((_, hash)) = home.session_id else {
            return;
        };
        let mut shard = self.shard(hash);
        {
            let mut state = home.state();
            if state.is_removed || !state.core.is_empty() {
                return;
            }
            state.is_removed = true;
        }
        let removed = shard.remove(&hash);
        shard.shrink_if_sparse();
        drop(shard);
        drop(removed);
    }

    /// Those that there are. One that comes or goes meanwhile may be among them.
    pub(super) fn entries(&self) -> impl Iterator<Item = Arc<SessionEntry<T>>> {
        let of_sessions = self.shards.iter().flat_map(|shard| {
            let homes = lock(shard);
            homes.values().cloned().collect::<Vec<_>>()
        });
        of_sessions.chain(self.sessionless.iter().cloned())
    }

    /// Has the home of one session found where that of another would be.
    #[cfg(test)]
    pub(super) fn pretend_collision(&self, session_id: &str, other: &str) {
        let home = self.find(session_id).unwrap();
        let hash = self.common.hasher.session_id(other);
        self.shard(hash).insert(hash, home);
    }

    fn shard(&self, hash: KeyHash) -> MutexGuard<'_, Shard<T>> {
        lock(self.shards.of(hash.number()))
    }
}

// === impl Later ===

impl<T: Tracked> DeferredEffects<T> {
    pub(crate) fn run(self) {
        self.entry.apply(&self.effects);
    }
}

// === impl Home ===

impl<T: Tracked> SessionEntry<T> {
    fn new(
        street: Weak<SessionMap<T>>,
        common: Arc<RegistryShared>,
        session_id: Option<(Arc<str>, KeyHash)>,
    ) -> Self {
        Self {
            map: street,
            session_id: session_id.clone(),
            state: Mutex::new(EntryState {
                core: Core::new(common, session_id),
                timer_deadline: None,
                is_removed: false,
            }),
            timer: OnceLock::new(),
        }
    }

    fn has_id(&self, session_id: &str) -> bool {
        let its = self.session_id.as_ref();
        its.is_some_and(|(its, _)| **its == *session_id)
    }

    /// Runs one operation on its core.
    pub(crate) fn with<R>(self: &Arc<Self>, operation: impl FnOnce(&mut Core<T>) -> R) -> R {
        let (result, after) = self.state().run(operation);
        self.apply(&after);
        result
    }

    /// Looks at its core.
    pub(super) fn read<R>(&self, look: impl FnOnce(&Core<T>) -> R) -> R {
        look(&self.state().core)
    }

    /// The same as [`with`](Self::with), but for what is left to be done.
    pub(crate) fn with_deferred<R>(
        self: &Arc<Self>,
        operation: impl FnOnce(&mut Core<T>) -> R,
    ) -> (R, DeferredEffects<T>) {
        let (result, after) = self.state().run(operation);
        let home = self.clone();
        (
            result,
            DeferredEffects {
                entry: home,
                effects: after,
            },
        )
    }

    /// Looks at its calls in flight that came before one, oldest first. Its lock is free in between and when they come out.
    pub(super) fn scan_calls<R>(
        self: Arc<Self>,
        before: CallId,
        look: impl Fn(CallId, &Entry<Arc<T>>) -> Option<R>,
    ) -> impl Iterator<Item = R> {
        let mut after = None;
        let pages = iter::from_fn(move || {
            let (page, last) = self.read(|core| {
                let mut last = None;
                let calls = core.calls_between(after, before).take(SCAN_BATCH);
                let calls = calls.inspect(|(id, _)| last = Some(*id));
                let page = calls.filter_map(|(id, entry)| look(id, entry));
                (page.collect::<Vec<_>>(), last)
            });
            after = Some(last?);
            Some(page)
        });
        pages.flatten()
    }

    fn apply(self: &Arc<Self>, after: &Effects) {
        if after.has_completed {
            self.notify_drain();
        }
        if let Some(at) = after.earlier_deadline {
            self.set_timer(at);
        }
        if after.is_empty {
            self.remove_if_empty();
        }
    }

    #[cold]
    fn notify_drain(&self) {
        if let Some(street) = self.map.upgrade() {
            street.ended.notify_waiters();
        }
    }

    /// Has the timer look at it.
    #[cold]
    fn set_timer(self: &Arc<Self>, at: Instant) {
        let Some(street) = self.map.upgrade() else {
            return;
        };
        if self.timer.get().is_none() {
            let home: Weak<Self> = Arc::downgrade(self);
            // Of two that come at the same time one is the first.
            let _first = self.timer.set(street.timer.set(at, home));
        }
        if let Some(ticket) = self.timer.get() {
            ticket.reset_earlier(at);
        }
        street.timer.ensure_on_current_runtime();
    }

    /// Leaves the street if nothing is known of its session.
    fn remove_if_empty(&self) {
        if self.session_id.is_some()
            && let Some(street) = self.map.upgrade()
        {
            street.remove_if_empty(self);
        }
    }

    /// Whether it has a deadline at which nobody would look at it.
    #[cfg(test)]
    pub(super) fn has_unscheduled_deadline(&self) -> bool {
        let next = self.state().core.next_deadline();
        let looked_at = self.timer.get().and_then(TimerHandle::deadline);
        next.is_some_and(|next| looked_at.is_none_or(|at| at > next))
    }

    fn state(&self) -> MutexGuard<'_, EntryState<T>> {
        lock(&self.state)
    }
}

impl<T: Tracked> OnDeadline for SessionEntry<T> {
    fn on_deadline(&self, watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
        let (expired, next, has_ended) = {
            let mut state = self.state();
            let (expired, after) = state.run(|core| core.expire_some(watch, EXPIRY_BATCH));
            state.timer_deadline = state.core.next_deadline();
            (expired, state.timer_deadline, after.has_completed)
        };
        if has_ended {
            self.notify_drain();
        }
        // Before anybody hears of what is over, which may last: the others are for whoever looks next.
        if let Some((ticket, next)) = self.timer.get().zip(next) {
            ticket.reset_earlier(next);
        }
        for (id, call, expired) in expired {
            // What is let go of is the user's. A destructor that panics harms no other call.
            catch_panic(|| match expired {
                Expired::Grace => call.on_grace_expired(id),
                Expired::GraceConfirmed => call.on_expired(id, CancelReason::Orphaned),
                Expired::Deadline => call.on_expired(id, CancelReason::TimedOut),
                Expired::Forgotten(finished) => call.on_untracked(id, finished),
            });
        }
        if self.state().core.is_empty() {
            self.remove_if_empty();
        }
        None
    }
}

// === impl Inside ===

impl<T: Tracked> EntryState<T> {
    fn run<R>(&mut self, operation: impl FnOnce(&mut Core<T>) -> R) -> (R, Effects) {
        let result = operation(&mut self.core);
        let next = self.core.next_deadline();
        let sooner = next.filter(|next| self.timer_deadline.is_none_or(|at| *next < at));
        if sooner.is_some() {
            self.timer_deadline = sooner;
        }
        let after = Effects {
            earlier_deadline: sooner,
            has_completed: self.core.take_completion_flag(),
            is_empty: self.core.is_empty(),
        };
        (result, after)
    }
}
