//! All calls in flight behind one lock, and the handle to them.
//!
//! `core` decides and never waits, the timer waits and never decides. The lock is held for a map operation,
//! never across an await or a callback.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{sync::Notify, time::Instant};

use self::{core::Core, managers::Managers, room::Room, streams::Streams};
use crate::{
    call::{CallId, CancelReason, Detachment, Key, Scope, SessionKey},
    limits::{Limit, Limits},
    observe::{Remark, Remarks},
    timer::{Ticket, Timer},
};

mod answer;
mod core;
mod drain;
mod expire;
mod managers;
mod room;
mod streams;

#[cfg(fuzzing)]
pub(crate) use self::core::as_the_model_says_of;
pub(crate) use self::{
    answer::Answer,
    core::{
        Detached, Dropped, End, Ended, Entry, FIRST, Finished, Form, Generation, MemoryLimits,
        UNSEEN_FOR, Wait,
    },
    streams::Outlet,
};
#[cfg(feature = "rmcp")]
pub(crate) use self::{
    answer::Content,
    core::{NOBODYS, numbers},
    managers::Manager,
};

pub(crate) type Named = core::Named<Answer>;

type Call<T> = (CallId, Arc<T>);

type Left<T> = core::Left<Arc<T>>;

/// What is registered for a call, and hears when its time is over. Called with no lock held.
pub(crate) trait Tracked: Send + Sync + 'static {
    /// Nobody will see the end of the call: it left.
    fn left(&self, id: CallId, finished: Finished);

    /// Its time is over.
    fn expired(self: &Arc<Self>, id: CallId, reason: CancelReason);
}

pub(crate) struct Registry<T> {
    state: Mutex<State<T>>,
    pub(crate) timer: Arc<Timer>,
    this: Weak<Self>,
    /// From the first deadline on.
    ticket: OnceLock<Ticket>,
    /// Notified when calls have ended while somebody drains.
    pub(crate) ended: Notify,
    /// Whether the stage is the last.
    closed: AtomicBool,
    /// How many calls were cancelled by drains.
    pub(crate) drained: AtomicUsize,
    room: Room,
    managers: Managers,
    remarks: Remarks,
}

/// How near the end of the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    /// Somebody waits for calls to end.
    Draining,
    /// Nothing is to go on.
    Closed,
}

/// When a call came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    InTime,
    /// The server is through: it is to end at once.
    TooLate,
}

pub(crate) struct State<T> {
    pub(crate) core: Core<Arc<T>, Answer>,
    /// The streams that no call keeps.
    streams: Streams,
    pub(crate) stage: Stage,
    /// When the timer looks at it, if it does, as far as it was told.
    awake_at: Option<Instant>,
}

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            state: Mutex::new(State {
                core: Core::new(),
                streams: Streams::default(),
                stage: Stage::Open,
                awake_at: None,
            }),
            timer: Arc::new(Timer::new()),
            this: this.clone(),
            ticket: OnceLock::new(),
            ended: Notify::new(),
            closed: AtomicBool::new(false),
            drained: AtomicUsize::new(0),
            room: Room::new(),
            managers: Managers::default(),
            remarks: Remarks::default(),
        })
    }

    /// Knows the sessions of a session manager from now on.
    #[cfg(feature = "rmcp")]
    pub(crate) fn add_manager(&self, manager: Weak<dyn Manager>) {
        self.managers.add(manager);
    }

    /// The session manager that has a session, by its scope.
    pub(crate) fn manager_of(&self, session: &str) -> Option<Scope> {
        self.managers.scope_of(session)
    }

    /// A call that is cancelled at `deadline`, attached or not. Says whether it came in time.
    pub(crate) fn start(
        &self,
        id: CallId,
        key: Option<Key>,
        call: Arc<T>,
        deadline: Option<Instant>,
    ) -> Started {
        self.with_state(|state| {
            state.core.start(id, key, call, deadline);
            state.started()
        })
    }

    /// Keeps a stream that no call keeps, to close it in the end.
    pub(crate) fn open(&self, stream: Weak<dyn Outlet>) {
        let is_closed = self.with_state(|state| {
            state.streams.add(stream.clone());
            state.stage == Stage::Closed
        });
        if let Some(stream) = stream.upgrade().filter(|_| is_closed) {
            stream.close();
        }
    }

    /// Whether streams that open are to be closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn start_accepted(
        &self,
        id: CallId,
        key: Key,
        call: Arc<T>,
        deadline: Option<Instant>,
    ) -> Started {
        let (left, started) = self.with_state(|state| {
            state.core.start(id, Some(key), call, deadline);
            (state.core.claim(id), state.started())
        });
        report(left);
        started
    }

    pub(crate) fn claim(&self, id: CallId) {
        report(self.with(|core| core.claim(id)));
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn rekey(&self, id: CallId, key: Key) {
        report(self.with(|core| core.rekey(id, key)));
    }

    pub(crate) fn name(&self, id: CallId, event_id: &[u8], form: Form) {
        // Names neither end a call nor bring a deadline.
        self.state().core.name(id, event_id, form);
    }

    pub(crate) fn blur(&self, id: CallId) {
        self.with(|core| core.blur(id));
    }

    pub(crate) fn detach(
        &self,
        id: CallId,
        generation: Generation,
        wait: Wait,
        barren: bool,
        detachment: Detachment,
    ) -> Detached {
        let detached = self.with(|core| core.detach(id, generation, wait, barren, detachment));
        if detached == Detached::Waiting {
            self.timer.on_this_runtime();
        }
        detached
    }

    /// Also tells since when it had no client.
    pub(crate) fn attach(&self, id: CallId) -> Option<(Arc<T>, Generation, Option<Detachment>)> {
        self.with(|core| {
            let detachment = core.detachment(id);
            let generation = core.attach(id)?;
            Some((core.call(id)?.clone(), generation, detachment))
        })
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn read_on(&self, id: CallId) {
        self.with(|core| core.read_on(id));
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn lose_sight(&self, id: CallId) {
        self.with(|core| core.lose_sight(id, Instant::now()));
    }

    pub(crate) fn named(&self, session: &SessionKey, event_id: &[u8]) -> Named {
        self.with(|core| core.named(session, event_id))
    }

    /// Whether anything is known of a session: calls in flight, or some that ended.
    #[cfg(feature = "rmcp")]
    pub(crate) fn has_session(&self, session: &SessionKey) -> bool {
        self.with(|core| core.has_session(session))
    }

    pub(crate) fn hold(&self, id: CallId) -> bool {
        self.with(|core| core.hold(id, Instant::now()))
    }

    pub(crate) fn release(&self, id: CallId) {
        self.with(|core| core.release(id, Instant::now()));
    }

    pub(crate) fn spare(&self, id: CallId) {
        self.with(|core| core.spare(id, Instant::now()));
    }

    pub(crate) fn finish(&self, id: CallId, remember: Option<Ended<Answer>>) -> Option<Finished> {
        self.with(|core| core.finish(id, remember))
    }

    pub(crate) fn finish_due(&self, id: CallId, ended: Ended<Answer>) -> Option<Finished> {
        self.with(|core| core.finish_due(id, ended))
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn finish_detached(&self, id: CallId, ended: Ended<Answer>) -> Option<Finished> {
        self.with(|core| core.finish_detached(id, ended))
    }

    pub(crate) fn find(&self, key: &Key) -> Option<Call<T>> {
        self.with(|core| core.find(key))
    }

    /// The same, also if its request is not accepted yet.
    pub(crate) fn find_any(&self, key: &Key) -> Option<Call<T>> {
        self.with(|core| core.find_any(key))
    }

    /// Whether the request of a call is neither accepted nor refused yet.
    pub(crate) fn is_undecided(&self, id: CallId) -> bool {
        self.with(|core| core.is_undecided(id))
    }

    pub(crate) fn take_session(&self, session: &SessionKey) -> Vec<Call<T>> {
        self.with(|core| core.take_session(session))
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn detached_in(&self, session: &SessionKey) -> Vec<Call<T>> {
        self.with(|core| core.detached_in(session))
    }

    pub(crate) fn is_detached(&self, id: CallId) -> bool {
        self.with(|core| core.is_detached(id))
    }

    pub(crate) fn call(&self, id: CallId) -> Option<Arc<T>> {
        self.with(|core| core.call(id).cloned())
    }

    pub(crate) fn is_in_flight(&self, id: CallId) -> bool {
        self.with(|core| core.call(id).is_some())
    }

    pub(crate) fn limit_memory(&self, limits: MemoryLimits) {
        self.with(|core| core.limit_memory(limits));
    }

    pub(crate) fn limit(&self, limits: Limits) {
        self.room.set_limit(limits.most(Limit::Calls));
        self.with(|core| core.limit(limits));
    }

    /// Whether so many more calls may be tracked.
    pub(crate) fn has_room(&self, calls: usize) -> bool {
        self.room.is_for(calls)
    }

    /// What was dropped from the memory and is not told yet.
    pub(crate) fn take_dropped(&self) -> Vec<Dropped> {
        self.state().core.take_dropped()
    }

    /// So many answers were dropped. How many were since that was said last, if it is time to say so.
    pub(crate) fn dropped(&self, answers: usize) -> Option<u64> {
        self.room.dropped(answers, Instant::now())
    }

    /// A call met a limit. How many did since that was said last, if it is time to say so.
    pub(crate) fn reached(&self, limit: Limit) -> Option<u64> {
        self.room.reached(limit, Instant::now())
    }

    /// Says something about the configuration of its layer, once.
    pub(crate) fn remark(&self, remark: Remark) {
        self.remarks.make(remark);
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn has_remarked(&self, remark: Remark) -> bool {
        self.remarks.include(remark)
    }

    fn with<R>(&self, operation: impl FnOnce(&mut Core<Arc<T>, Answer>) -> R) -> R {
        self.with_state(|state| operation(&mut state.core))
    }

    /// Runs one operation, and tells the timer if it brought an earlier deadline.
    fn with_state<R>(&self, operation: impl FnOnce(&mut State<T>) -> R) -> R {
        let mut state = self.state();
        let before = state.core.len();
        let result = operation(&mut state);
        let ended = self.note_calls(&state, before);
        let next = state.core.next_deadline();
        let earlier = next.filter(|next| state.awake_at.is_none_or(|at| *next < at));
        if earlier.is_some() {
            state.awake_at = earlier;
        }
        drop(state);
        if let Some(at) = earlier {
            self.look_by(at);
        }
        if ended {
            self.ended.notify_waiters();
        }
        result
    }

    /// Notes how many calls there are. Says whether somebody who drains is to hear of it.
    fn note_calls(&self, state: &State<T>, before: usize) -> bool {
        let after = state.core.len();
        self.room.note(after);
        state.stage != Stage::Open && after < before
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Tracked> State<T> {
    fn started(&self) -> Started {
        match self.stage {
            Stage::Open | Stage::Draining => Started::InTime,
            Stage::Closed => Started::TooLate,
        }
    }
}

/// Has a call say that it is gone, if one is. No lock is held.
fn report<T: Tracked>(left: Option<Left<T>>) {
    if let Some((id, exchange, finished)) = left {
        exchange.left(id, finished);
    }
}

impl<T> fmt::Debug for Registry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}
