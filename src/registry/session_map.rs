//! Maps session ids to session states.
//!
//! Each session has its own lock, and each call belongs to exactly one session. Entries are keyed by session id alone, so a call stays in
//! the same entry once its session manager becomes known. Two session ids share a lock only while an entry is being looked up, added or
//! removed.

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

/// Number of entries for calls without a session.
///
/// This is also how many of these calls can start or end concurrently.
const SESSIONLESS_SHARDS: usize = 16;

/// Maximum number of expired deadlines handled each time an entry is locked.
///
/// This applies separately to in-flight calls and to retained calls.
pub(super) const EXPIRY_BATCH: usize = 16;

/// Maximum number of calls scanned each time an entry is locked. Scanning this many takes about a tenth of a millisecond, so no other call
/// waits long for the lock.
pub(super) const SCAN_BATCH: usize = 256;

pub(crate) type SessionState<T> = core::SessionState<Arc<T>, Answer>;

pub(crate) type UntrackedCall<T> = core::UntrackedCall<Arc<T>>;

/// The entries for session ids, and for calls without a session.
pub(crate) struct SessionMap<T> {
    shards: Shards<Mutex<Shard<T>>>,
    sessionless: [Arc<SessionEntry<T>>; SESSIONLESS_SHARDS],
    pub(super) shared: Arc<RegistryShared>,
    pub(super) timer: Arc<Timer>,
    /// Notified when calls end while completions are tracked, and when the last delivery ends.
    pub(super) ended: Notify,
}

type Shard<T> = PrehashedMap<Arc<SessionEntry<T>>>;

/// A session id's state, behind its lock, and its timer.
pub(crate) struct SessionEntry<T> {
    map: Weak<SessionMap<T>>,
    /// The session id and its hash. `None` for calls without a session.
    session_id: Option<(Arc<str>, KeyHash)>,
    state: Mutex<EntryState<T>>,
    /// The timer entry for the next deadline, created along with the first deadline.
    timer: OnceLock<TimerHandle>,
}

struct EntryState<T> {
    session: SessionState<T>,
    /// When the timer will check this entry, if at all.
    timer_deadline: Option<Instant>,
    /// Whether the entry has been removed from the map. If so, the session may already have another entry.
    is_removed: bool,
}

/// The effects of an operation on an entry, to be applied once no lock is held.
#[must_use]
pub(crate) struct DeferredEffects<T> {
    entry: Arc<SessionEntry<T>>,
    effects: Effects,
}

struct Effects {
    /// The entry's next deadline, if it is earlier than the timer's.
    earlier_deadline: Option<Instant>,
    /// Whether a call has ended while completions are being tracked.
    has_completed: bool,
    is_empty: bool,
}

// === impl SessionMap ===

impl<T: Tracked> SessionMap<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new_cyclic(|map| {
            let shared = Arc::new(RegistryShared::default());
            let sessionless = || Arc::new(SessionEntry::new(map.clone(), shared.clone(), None));
            Self {
                shards: Shards::default(),
                sessionless: [(); SESSIONLESS_SHARDS].map(|()| sessionless()),
                shared,
                timer: Arc::new(Timer::new()),
                ended: Notify::new(),
            }
        })
    }

    /// Returns a session id's entry, or `None` if none exists or another id has the same hash.
    pub(super) fn find(&self, session_id: &str) -> Option<Arc<SessionEntry<T>>> {
        let hash = self.shared.hasher.session_id(session_id);
        let shard = self.shard(hash);
        let entry = shard.get(&hash).filter(|entry| entry.has_id(session_id))?;
        Some(entry.clone())
    }

    /// Runs an operation on a session id's state, inserting an entry if there is none.
    ///
    /// Returns the operation's effects, which the caller must apply once no lock is held.
    ///
    /// If another session id has the same hash, the call is stored in an entry for calls without a session, because a single entry could
    /// not tell the two sessions' calls apart.
    pub(super) fn with_or_insert<R>(
        self: &Arc<Self>,
        session_id: Option<&Arc<str>>,
        id: CallId,
        operation: impl FnOnce(&Arc<SessionEntry<T>>, &mut SessionState<T>) -> R,
    ) -> (R, DeferredEffects<T>) {
        loop {
            let entry = session_id.and_then(|session_id| self.find_or_insert(session_id));
            let entry = entry.unwrap_or_else(|| self.sessionless(id).clone());
            let mut state = entry.state();
            // If the entry has been removed since the lookup, look it up again.
            if !state.is_removed {
                let (result, effects) = state.run(|session| operation(&entry, session));
                drop(state);
                return (result, DeferredEffects { entry, effects });
            }
        }
    }

    /// Returns the entry for a call without a session.
    fn sessionless(&self, id: CallId) -> &Arc<SessionEntry<T>> {
        let index = u64::from(id) as usize % SESSIONLESS_SHARDS;
        #[expect(
            clippy::indexing_slicing,
            reason = "the remainder is less than the length"
        )]
        &self.sessionless[index]
    }

    /// Returns a session id's entry, or `None` if its hash collides with another id's.
    fn find_or_insert(self: &Arc<Self>, session_id: &Arc<str>) -> Option<Arc<SessionEntry<T>>> {
        let hash = self.shared.hasher.session_id(session_id);
        match self.shard(hash).entry(hash) {
            hash_map::Entry::Occupied(entry) if !entry.get().has_id(session_id) => None,
            hash_map::Entry::Occupied(entry) => Some(entry.get().clone()),
            hash_map::Entry::Vacant(vacant) => {
                let map = Arc::downgrade(self);
                let session_id = Some((session_id.clone(), hash));
                let entry = SessionEntry::new(map, self.shared.clone(), session_id);
                Some(vacant.insert(Arc::new(entry)).clone())
            }
        }
    }

    /// Removes an entry if its session has no calls. No other function locks an entry while holding its shard's lock.
    fn remove_if_empty(&self, entry: &SessionEntry<T>) {
        let Some((_, hash)) = entry.session_id else {
            return;
        };
        let mut shard = self.shard(hash);
        {
            let mut state = entry.state();
            if state.is_removed || !state.session.is_empty() {
                return;
            }
            state.is_removed = true;
        }
        let removed = shard.remove(&hash);
        shard.shrink_if_sparse();
        // Drop the entry without holding the lock.
        drop(shard);
        drop(removed);
    }

    /// Returns all entries. Entries added or removed during the iteration may or may not be included.
    pub(super) fn entries(&self) -> impl Iterator<Item = Arc<SessionEntry<T>>> {
        let session_entries = self.shards.iter().flat_map(|shard| {
            let entries = lock(shard);
            entries.values().cloned().collect::<Vec<_>>()
        });
        session_entries.chain(self.sessionless.iter().cloned())
    }

    /// Stores one session's entry under another session's hash.
    #[cfg(test)]
    pub(super) fn pretend_collision(&self, session_id: &str, other: &str) {
        let entry = self.find(session_id).unwrap();
        let hash = self.shared.hasher.session_id(other);
        self.shard(hash).insert(hash, entry);
    }

    fn shard(&self, hash: KeyHash) -> MutexGuard<'_, Shard<T>> {
        lock(self.shards.get(hash.number()))
    }
}

// === impl DeferredEffects ===

impl<T: Tracked> DeferredEffects<T> {
    pub(crate) fn run(self) {
        self.entry.apply(&self.effects);
    }
}

// === impl SessionEntry ===

impl<T: Tracked> SessionEntry<T> {
    fn new(
        map: Weak<SessionMap<T>>,
        shared: Arc<RegistryShared>,
        session_id: Option<(Arc<str>, KeyHash)>,
    ) -> Self {
        Self {
            map,
            session_id: session_id.clone(),
            state: Mutex::new(EntryState {
                session: SessionState::new(shared, session_id),
                timer_deadline: None,
                is_removed: false,
            }),
            timer: OnceLock::new(),
        }
    }

    fn has_id(&self, session_id: &str) -> bool {
        let own_id = self.session_id.as_ref();
        own_id.is_some_and(|(own_id, _)| **own_id == *session_id)
    }

    /// Runs an operation on the session state and applies its effects.
    pub(crate) fn with<R>(
        self: &Arc<Self>,
        operation: impl FnOnce(&mut SessionState<T>) -> R,
    ) -> R {
        let (result, effects) = self.state().run(operation);
        self.apply(&effects);
        result
    }

    pub(super) fn read<R>(&self, select: impl FnOnce(&SessionState<T>) -> R) -> R {
        select(&self.state().session)
    }

    /// Like [`with`](Self::with), but returns the effects instead of applying them.
    pub(crate) fn with_deferred<R>(
        self: &Arc<Self>,
        operation: impl FnOnce(&mut SessionState<T>) -> R,
    ) -> (R, DeferredEffects<T>) {
        let (result, effects) = self.state().run(operation);
        let entry = self.clone();
        (result, DeferredEffects { entry, effects })
    }

    /// Scans the in-flight calls that started before `before`, oldest first. The lock is released between batches.
    pub(super) fn scan_calls<R>(
        self: Arc<Self>,
        before: CallId,
        select: impl Fn(CallId, &Entry<Arc<T>>) -> Option<R>,
    ) -> impl Iterator<Item = R> {
        let mut after = None;
        let batches = iter::from_fn(move || {
            let (batch, last) = self.read(|session| {
                let mut last = None;
                let calls = session.calls_between(after, before).take(SCAN_BATCH);
                let calls = calls.inspect(|(id, _)| last = Some(*id));
                let batch = calls.filter_map(|(id, entry)| select(id, entry));
                (batch.collect::<Vec<_>>(), last)
            });
            after = Some(last?);
            Some(batch)
        });
        batches.flatten()
    }

    fn apply(self: &Arc<Self>, effects: &Effects) {
        if effects.has_completed {
            self.notify_drain();
        }
        if let Some(at) = effects.earlier_deadline {
            self.set_timer(at);
        }
        if effects.is_empty {
            self.remove_if_empty();
        }
    }

    #[cold]
    fn notify_drain(&self) {
        if let Some(map) = self.map.upgrade() {
            map.ended.notify_waiters();
        }
    }

    /// Sets the timer to `at`, unless it is already set to an earlier time.
    #[cold]
    fn set_timer(self: &Arc<Self>, at: Instant) {
        let Some(map) = self.map.upgrade() else {
            return;
        };
        let timer = self.timer.get_or_init(|| {
            let entry: Weak<Self> = Arc::downgrade(self);
            map.timer.set(at, entry)
        });
        timer.reset_earlier(at);
        map.timer.ensure_on_current_runtime();
    }

    /// Removes this entry from the map if its session has no calls.
    fn remove_if_empty(&self) {
        if self.session_id.is_some()
            && let Some(map) = self.map.upgrade()
        {
            map.remove_if_empty(self);
        }
    }

    /// Returns `true` if the entry has a deadline that the timer is not set for.
    #[cfg(test)]
    pub(super) fn has_unscheduled_deadline(&self) -> bool {
        let next = self.state().session.next_deadline();
        let timer_deadline = self.timer.get().and_then(TimerHandle::deadline);
        next.is_some_and(|next| timer_deadline.is_none_or(|at| at > next))
    }

    fn state(&self) -> MutexGuard<'_, EntryState<T>> {
        lock(&self.state)
    }
}

impl<T: Tracked> OnDeadline for SessionEntry<T> {
    fn on_deadline(&self, tracker: &LatenessTracker, _timeliness: Timeliness) -> Option<Rearm> {
        let (expired, next, has_completed) = {
            let mut state = self.state();
            let (expired, effects) =
                state.run(|session| session.expire_some(tracker, EXPIRY_BATCH));
            state.timer_deadline = state.session.next_deadline();
            (expired, state.timer_deadline, effects.has_completed)
        };
        if has_completed {
            self.notify_drain();
        }
        // Set the timer before reporting the expired calls, which may take a while. Its next run handles whatever is left.
        if let Some((timer, next)) = self.timer.get().zip(next) {
            timer.reset_earlier(next);
        }
        for (id, call, expired) in expired {
            // This drops the application's values, and a panicking destructor must not affect other calls.
            catch_panic(|| match expired {
                Expired::Grace => call.on_grace_expired(id),
                Expired::GraceConfirmed => call.on_expired(id, CancelReason::Orphaned),
                Expired::Deadline => call.on_expired(id, CancelReason::TimedOut),
                Expired::Forgotten(finished) => call.on_untracked(id, finished),
            });
        }
        if self.state().session.is_empty() {
            self.remove_if_empty();
        }
        None
    }
}

// === impl EntryState ===

impl<T: Tracked> EntryState<T> {
    fn run<R>(&mut self, operation: impl FnOnce(&mut SessionState<T>) -> R) -> (R, Effects) {
        let result = operation(&mut self.session);
        let next = self.session.next_deadline();
        let earlier_deadline = next.filter(|next| self.timer_deadline.is_none_or(|at| *next < at));
        if earlier_deadline.is_some() {
            self.timer_deadline = earlier_deadline;
        }
        let effects = Effects {
            earlier_deadline,
            has_completed: self.session.take_completion_flag(),
            is_empty: self.session.is_empty(),
        };
        (result, effects)
    }
}
