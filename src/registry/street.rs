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
    core::{self, Common, Entry, Expired, GiveBack, NameHash, Slots},
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
const LONE: usize = 16;

/// How much of what is due in a home is done at a time: 16 calls, and as many records of ended ones of each rank. Then its
/// lock is free.
pub(super) const PORTION: usize = 16;

/// At how many calls one looks while a home is locked: 256, which takes about a tenth of a millisecond.
pub(super) const PAGE: usize = 256;

pub(crate) type Core<T> = core::Core<Arc<T>, Answer>;

pub(crate) type Left<T> = core::Left<Arc<T>>;

pub(crate) struct Street<T> {
    shards: Shards<Mutex<Shard<T>>>,
    lone: [Arc<Home<T>>; LONE],
    pub(super) common: Arc<Common>,
    pub(super) timer: Arc<Timer>,
    /// Notified when calls have ended while that is counted.
    pub(super) ended: Notify,
}

type Shard<T> = Slots<Arc<Home<T>>>;

pub(crate) struct Home<T> {
    street: Weak<Street<T>>,
    /// The session id and its hash. `None` if its calls have no session.
    session_id: Option<(Arc<str>, NameHash)>,
    state: Mutex<Inside<T>>,
    /// Has the timer look at it, once anything of it came to have a time.
    ticket: OnceLock<TimerHandle>,
}

struct Inside<T> {
    core: Core<T>,
    /// When the timer looks at it, if it does.
    awake_at: Option<Instant>,
    /// Nothing was known of its session, and nobody finds it any more: the session has another home, or none.
    is_gone: bool,
}

/// What an operation on a home leaves to be done once nothing is locked.
#[must_use]
pub(crate) struct Later<T> {
    home: Arc<Home<T>>,
    after: After,
}

struct After {
    /// There is an earlier deadline than the timer knows.
    sooner: Option<Instant>,
    /// Somebody waits for calls to end, and one has.
    has_ended: bool,
    is_empty: bool,
}

// === impl Street ===

impl<T: Tracked> Street<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new_cyclic(|street| {
            let common = Arc::new(Common::default());
            let lone = || Arc::new(Home::new(street.clone(), common.clone(), None));
            Self {
                shards: Shards::default(),
                lone: [(); LONE].map(|()| lone()),
                common,
                timer: Arc::new(Timer::new()),
                ended: Notify::new(),
            }
        })
    }

    /// The home of a session id of which something is known.
    pub(super) fn find(&self, session_id: &str) -> Option<Arc<Home<T>>> {
        let hash = self.common.names.id(session_id);
        let shard = self.shard(hash);
        let home = shard.get(&hash).filter(|home| home.is_of(session_id))?;
        Some(home.clone())
    }

    /// Runs one operation in the home of a session id, which is built if there is none. What is left to be done comes
    /// back: nothing else is locked then.
    ///
    /// If another id has its hash, its calls and those of this one could not be told apart: then they live where
    /// calls without a session do.
    pub(super) fn enter<R>(
        self: &Arc<Self>,
        session_id: Option<&Arc<str>>,
        id: CallId,
        operation: impl FnOnce(&Arc<Home<T>>, &mut Core<T>) -> R,
    ) -> (R, Later<T>) {
        loop {
            let home = session_id.and_then(|session_id| self.find_or_build(session_id));
            let home = home.unwrap_or_else(|| self.lone(id).clone());
            let mut state = home.state();
            // Else it left the street meanwhile.
            if !state.is_gone {
                let (result, after) = state.run(|core| operation(&home, core));
                drop(state);
                return (result, Later { home, after });
            }
        }
    }

    /// Where calls without a session live.
    fn lone(&self, id: CallId) -> &Arc<Home<T>> {
        let at = u64::from(id) as usize % LONE;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        &self.lone[at]
    }

    fn find_or_build(self: &Arc<Self>, session_id: &Arc<str>) -> Option<Arc<Home<T>>> {
        let hash = self.common.names.id(session_id);
        match self.shard(hash).entry(hash) {
            hash_map::Entry::Occupied(home) if !home.get().is_of(session_id) => None,
            hash_map::Entry::Occupied(home) => Some(home.get().clone()),
            hash_map::Entry::Vacant(vacant) => {
                let street = Arc::downgrade(self);
                let session_id = Some((session_id.clone(), hash));
                let home = Home::new(street, self.common.clone(), session_id);
                Some(vacant.insert(Arc::new(home)).clone())
            }
        }
    }

    /// Removes a home of whose session nothing is known. Here alone a home is locked while its shard is.
    fn remove_if_empty(&self, home: &Home<T>) {
        let Some((_, hash)) = home.session_id else {
            return;
        };
        let mut shard = self.shard(hash);
        {
            let mut state = home.state();
            if state.is_gone || !state.core.is_empty() {
                return;
            }
            state.is_gone = true;
        }
        let removed = shard.remove(&hash);
        shard.give_back();
        drop(shard);
        drop(removed);
    }

    /// Those that there are. One that comes or goes meanwhile may be among them.
    pub(super) fn homes(&self) -> impl Iterator<Item = Arc<Home<T>>> {
        let of_sessions = self.shards.iter().flat_map(|shard| {
            let homes = lock(shard);
            homes.values().cloned().collect::<Vec<_>>()
        });
        of_sessions.chain(self.lone.iter().cloned())
    }

    /// Has the home of one session found where that of another would be.
    #[cfg(test)]
    pub(super) fn pretend_collision(&self, session_id: &str, other: &str) {
        let home = self.find(session_id).unwrap();
        let hash = self.common.names.id(other);
        self.shard(hash).insert(hash, home);
    }

    fn shard(&self, hash: NameHash) -> MutexGuard<'_, Shard<T>> {
        lock(self.shards.of(hash.number()))
    }
}

// === impl Later ===

impl<T: Tracked> Later<T> {
    pub(crate) fn done(self) {
        self.home.after(&self.after);
    }
}

// === impl Home ===

impl<T: Tracked> Home<T> {
    fn new(
        street: Weak<Street<T>>,
        common: Arc<Common>,
        session_id: Option<(Arc<str>, NameHash)>,
    ) -> Self {
        Self {
            street,
            session_id: session_id.clone(),
            state: Mutex::new(Inside {
                core: Core::new(common, session_id),
                awake_at: None,
                is_gone: false,
            }),
            ticket: OnceLock::new(),
        }
    }

    fn is_of(&self, session_id: &str) -> bool {
        let its = self.session_id.as_ref();
        its.is_some_and(|(its, _)| **its == *session_id)
    }

    /// Runs one operation on its core.
    pub(crate) fn with<R>(self: &Arc<Self>, operation: impl FnOnce(&mut Core<T>) -> R) -> R {
        let (result, after) = self.state().run(operation);
        self.after(&after);
        result
    }

    /// Looks at its core.
    pub(super) fn peek<R>(&self, look: impl FnOnce(&Core<T>) -> R) -> R {
        look(&self.state().core)
    }

    /// The same as [`with`](Self::with), but for what is left to be done.
    pub(crate) fn begin<R>(
        self: &Arc<Self>,
        operation: impl FnOnce(&mut Core<T>) -> R,
    ) -> (R, Later<T>) {
        let (result, after) = self.state().run(operation);
        let home = self.clone();
        (result, Later { home, after })
    }

    /// Looks at its calls in flight that came before one, oldest first. Its lock is free in between and when they come out.
    pub(super) fn look_at_calls<R>(
        self: Arc<Self>,
        before: CallId,
        look: impl Fn(CallId, &Entry<Arc<T>>) -> Option<R>,
    ) -> impl Iterator<Item = R> {
        let mut after = None;
        let pages = iter::from_fn(move || {
            let (page, last) = self.peek(|core| {
                let mut last = None;
                let calls = core.calls_between(after, before).take(PAGE);
                let calls = calls.inspect(|(id, _)| last = Some(*id));
                let page = calls.filter_map(|(id, entry)| look(id, entry));
                (page.collect::<Vec<_>>(), last)
            });
            after = Some(last?);
            Some(page)
        });
        pages.flatten()
    }

    fn after(self: &Arc<Self>, after: &After) {
        if after.has_ended {
            self.tell_ended();
        }
        if let Some(at) = after.sooner {
            self.wake(at);
        }
        if after.is_empty {
            self.leave();
        }
    }

    #[cold]
    fn tell_ended(&self) {
        if let Some(street) = self.street.upgrade() {
            street.ended.notify_waiters();
        }
    }

    /// Has the timer look at it.
    #[cold]
    fn wake(self: &Arc<Self>, at: Instant) {
        let Some(street) = self.street.upgrade() else {
            return;
        };
        if self.ticket.get().is_none() {
            let home: Weak<Self> = Arc::downgrade(self);
            // Of two that come at the same time one is the first.
            let _first = self.ticket.set(street.timer.set(at, home));
        }
        if let Some(ticket) = self.ticket.get() {
            ticket.reset_earlier(at);
        }
        street.timer.ensure_on_current_runtime();
    }

    /// Leaves the street if nothing is known of its session.
    fn leave(&self) {
        if self.session_id.is_some()
            && let Some(street) = self.street.upgrade()
        {
            street.remove_if_empty(self);
        }
    }

    /// Whether it has a deadline at which nobody would look at it.
    #[cfg(test)]
    pub(super) fn is_forgotten(&self) -> bool {
        let next = self.state().core.next_deadline();
        let looked_at = self.ticket.get().and_then(TimerHandle::deadline);
        next.is_some_and(|next| looked_at.is_none_or(|at| at > next))
    }

    fn state(&self) -> MutexGuard<'_, Inside<T>> {
        lock(&self.state)
    }
}

impl<T: Tracked> OnDeadline for Home<T> {
    fn on_deadline(&self, watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
        let (expired, next, has_ended) = {
            let mut state = self.state();
            let (expired, after) = state.run(|core| core.expire_some(watch, PORTION));
            state.awake_at = state.core.next_deadline();
            (expired, state.awake_at, after.has_ended)
        };
        if has_ended {
            self.tell_ended();
        }
        // Before anybody hears of what is over, which may last: the others are for whoever looks next.
        if let Some((ticket, next)) = self.ticket.get().zip(next) {
            ticket.reset_earlier(next);
        }
        for (id, call, expired) in expired {
            // What is let go of is the user's. A destructor that panics harms no other call.
            catch_panic(|| match expired {
                Expired::Grace => call.orphaned(id),
                Expired::Confirmed => call.expired(id, CancelReason::Orphaned),
                Expired::Deadline => call.expired(id, CancelReason::TimedOut),
                Expired::Unseen(finished) => call.left(id, finished),
            });
        }
        if self.state().core.is_empty() {
            self.leave();
        }
        None
    }
}

// === impl Inside ===

impl<T: Tracked> Inside<T> {
    fn run<R>(&mut self, operation: impl FnOnce(&mut Core<T>) -> R) -> (R, After) {
        let result = operation(&mut self.core);
        let next = self.core.next_deadline();
        let sooner = next.filter(|next| self.awake_at.is_none_or(|at| *next < at));
        if sooner.is_some() {
            self.awake_at = sooner;
        }
        let after = After {
            sooner,
            has_ended: self.core.take_finished(),
            is_empty: self.core.is_empty(),
        };
        (result, after)
    }
}
