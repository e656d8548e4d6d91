//! Routing: the stream to which a line of the server belongs. Without I/O or a clock of its own.
//!
//! On stdio all calls of a session share one pipe, and few lines say whose they are. The rules:
//!
//! 1. **An answer** is sent to the call whose id it has, by its value, and ends it. There is one at most: a request is refused while the
//!    server owes an answer to one with an id that it may take for the same. A second answer is dropped. `"7"` answers 7, and 7
//!    answers `"7"`, if the client has never sent an id of that other kind: else it may be a second answer.
//! 2. **Progress** is sent to the call with its token. A token that two calls have belongs to none of them, until both are over.
//! 3. **Anything else** is sent to the only call that is open, beyond doubt, else to the standalone stream. The task of the session
//!    sends it there as well while the client has left that call.
//! 4. **A cancel** of the client closes its call: from then on nothing but its answer is for it, and that only for
//!    [`UPSTREAM_LINGER`]. Its id and its token stay taken, because the server may still use them.
//! 5. **Nothing is owed for ever.** Of calls that were cancelled and never answered the newest [`MAX_UNANSWERED`] are known.
//! 6. **The end** is told to every open call once, and afterwards there is none.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use tokio::time::Instant;

pub use crate::event_store::UPSTREAM_LINGER;
use crate::message::{IdKey, Kind, LooseIdKey, Message};

/// How many calls of a session may be open: 1,024.
pub const MAX_OPEN: usize = 1024;

/// How many cancelled calls are remembered for which the server owes an answer: 1,024. Most servers never send it.
pub const MAX_UNANSWERED: usize = 1024;

/// The calls of one session, each with its stream.
#[derive(Debug)]
pub struct Routes<S> {
    open: HashMap<LooseIdKey, Call<S>>,
    unanswered: HashMap<LooseIdKey, Unanswered<S>>,
    tokens: HashMap<IdKey, Owner>,
    kill_after: Option<Duration>,
    /// Some id of the client was a string, and some was a number.
    had_text: bool,
    had_number: bool,
    ended: bool,
}

/// Where a message of the server goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route<S> {
    /// It is the answer of a call, which is over now.
    Answer(S),
    /// It is for a call that runs on.
    Call(S),
    /// It is for whoever listens to the session.
    Standalone,
    /// It is for nobody.
    Dropped,
}

/// Why a request is not sent to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The server owes an answer to a request with this id.
    IdInUse,
    /// [`MAX_OPEN`] calls are open.
    TooMany,
    /// The session has ended.
    Ended,
}

/// What time has decided.
#[derive(Debug, PartialEq, Eq)]
pub struct Due<S> {
    /// Nothing more comes on these streams.
    pub closed: Vec<S>,
    /// A call that was told to stop has not answered in time.
    pub overdue: bool,
}

#[derive(Debug)]
struct Call<S> {
    id: IdKey,
    token: Option<IdKey>,
    stream: S,
}

/// A call that was cancelled and not answered.
#[derive(Debug)]
struct Unanswered<S> {
    id: IdKey,
    token: Option<IdKey>,
    stream: Option<S>,
    since: Instant,
    /// How long since then the process could not write.
    blocked_for: Duration,
    /// It counts for [`Due::overdue`].
    may_be_overdue: bool,
}

/// Whose a progress token is.
#[derive(Debug)]
struct Owner {
    calls: usize,
    /// `None` once there was more than one.
    only: Option<LooseIdKey>,
}

// === impl Routes ===

impl<S: Clone> Routes<S> {
    /// Without a call. With `kill_after`, a call that was cancelled is overdue after that.
    #[must_use]
    pub fn new(kill_after: Option<Duration>) -> Self {
        Self {
            open: HashMap::new(),
            unanswered: HashMap::new(),
            tokens: HashMap::new(),
            kill_after,
            had_text: false,
            had_number: false,
            ended: false,
        }
    }

    /// A request is about to be sent to the server. If it may be, `stream` is made for it; if there is none, it is
    /// not begun.
    pub fn begin<E: From<Refused>>(
        &mut self,
        id: IdKey,
        token: Option<IdKey>,
        stream: impl FnOnce() -> Result<S, E>,
    ) -> Result<S, E> {
        let key = id.loose();
        if self.ended {
            return Err(Refused::Ended.into());
        }
        if self.unanswered.contains_key(&key) {
            return Err(Refused::IdInUse.into());
        }
        let open = self.open.len();
        let Entry::Vacant(vacant) = self.open.entry(key.clone()) else {
            return Err(Refused::IdInUse.into());
        };
        if open >= MAX_OPEN {
            return Err(Refused::TooMany.into());
        }
        let stream = stream()?;
        if id.is_text() {
            self.had_text = true
        } else {
            self.had_number = true
        }
        if let Some(token) = &token {
            let owner = self.tokens.entry(token.clone());
            let owner = owner.or_insert(Owner {
                calls: 0,
                only: Some(key),
            });
            owner.calls += 1;
            if owner.calls > 1 {
                owner.only = None;
            }
        }
        let call = Call {
            id,
            token,
            stream: stream.clone(),
        };
        vacant.insert(call);
        Ok(stream)
    }

    /// Where this message of the server goes. An answer ends its call.
    pub fn route(&mut self, message: &Message<'_>) -> Route<S> {
        if message.kind == Kind::Response {
            return message
                .id
                .and_then(IdKey::of)
                .map_or(Route::Dropped, |id| self.answered(&id));
        }
        if message.method.as_deref() == Some("notifications/progress") {
            return self.progress(message);
        }
        let mut open = self.open.values();
        match (open.next(), open.next()) {
            (Some(only), None) => Route::Call(only.stream.clone()),
            _ => Route::Standalone,
        }
    }

    fn progress(&self, message: &Message<'_>) -> Route<S> {
        let token = message.params().progress_token.and_then(IdKey::of);
        let owner = token.and_then(|token| self.tokens.get(&token));
        let Some(key) = owner.and_then(|owner| owner.only.as_ref()) else {
            return Route::Standalone;
        };
        let call = self.open.get(key);
        // If it is not open, it was cancelled.
        call.map_or(Route::Dropped, |call| Route::Call(call.stream.clone()))
    }

    /// Where the answer to the request with this id goes. It ends its call.
    pub fn answered(&mut self, id: &IdKey) -> Route<S> {
        let has_own_kind = if id.is_text() {
            self.had_text
        } else {
            self.had_number
        };
        match id.counterpart().filter(|_| !has_own_kind) {
            Some(counterpart) => self.answered_by(&counterpart),
            None => self.answered_by(id),
        }
    }

    fn answered_by(&mut self, id: &IdKey) -> Route<S> {
        let key = id.loose();
        if let Entry::Occupied(call) = self.open.entry(key.clone())
            && call.get().id == *id
        {
            let call = call.remove();
            self.release_token(call.token);
            return Route::Answer(call.stream);
        }
        if let Entry::Occupied(unanswered) = self.unanswered.entry(key)
            && unanswered.get().id == *id
        {
            let unanswered = unanswered.remove();
            self.release_token(unanswered.token);
            return unanswered.stream.map_or(Route::Dropped, Route::Answer);
        }
        Route::Dropped
    }

    /// The client has cancelled the call with this id, and the server is notified. Returns the stream of a call that is
    /// forgotten for it, if nothing more comes on that.
    pub fn cancelled(&mut self, id: &IdKey, now: Instant) -> Option<S> {
        let key = id.loose();
        let Entry::Occupied(call) = self.open.entry(key.clone()) else {
            return None;
        };
        if call.get().id != *id {
            return None;
        }
        let call = call.remove();
        let evicted = if self.unanswered.len() >= MAX_UNANSWERED {
            self.evict_oldest()
        } else {
            None
        };
        let unanswered = Unanswered {
            id: call.id,
            token: call.token,
            stream: Some(call.stream),
            since: now,
            blocked_for: Duration::ZERO,
            may_be_overdue: self.kill_after.is_some(),
        };
        self.unanswered.insert(key, unanswered);
        evicted
    }

    /// When [`due`](Self::due) has something next.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let due = self.unanswered.values().flat_map(|unanswered| {
            let closed = unanswered
                .stream
                .as_ref()
                .map(|_| unanswered.since + UPSTREAM_LINGER);
            let kill = self
                .kill_after
                .filter(|_| unanswered.may_be_overdue)
                .map(|after| unanswered.since + unanswered.blocked_for + after);
            [closed, kill]
        });
        due.flatten().min()
    }

    /// The process could not write for this long until now, and so it could not answer. That time does not count for
    /// [`Due::overdue`].
    pub fn add_blocked_time(&mut self, now: Instant, blocked: Duration) {
        for unanswered in self.unanswered.values_mut() {
            unanswered.blocked_for += blocked.min(now - unanswered.since);
        }
    }

    /// What time has decided until now. Each is told once. Nothing is overdue while the process cannot write, which is to be
    /// [excused](Self::excuse) when it can again.
    pub fn due(&mut self, now: Instant, is_blocked: bool) -> Due<S> {
        let mut due = Due {
            closed: Vec::new(),
            overdue: false,
        };
        for unanswered in self.unanswered.values_mut() {
            if unanswered.since + UPSTREAM_LINGER <= now {
                due.closed.extend(unanswered.stream.take());
            }
            let is_overdue = self.kill_after.is_some_and(|after| {
                !is_blocked && unanswered.since + unanswered.blocked_for + after <= now
            });
            if is_overdue && std::mem::take(&mut unanswered.may_be_overdue) {
                due.overdue = true;
            }
        }
        due
    }

    /// The server is gone: the streams of the calls that are open. None can be begun from here on.
    pub fn end(&mut self) -> Vec<S> {
        self.ended = true;
        self.tokens.clear();
        let unanswered = self
            .unanswered
            .drain()
            .filter_map(|(_, unanswered)| unanswered.stream);
        let open = self.open.drain().map(|(_, call)| call.stream);
        open.chain(unanswered).collect()
    }

    /// The streams of the calls that are open.
    pub fn streams(&self) -> impl Iterator<Item = &S> {
        self.open.values().map(|call| &call.stream)
    }

    /// Whether no call is open.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    fn evict_oldest(&mut self) -> Option<S> {
        let oldest = self
            .unanswered
            .iter()
            .min_by_key(|(_, unanswered)| unanswered.since);
        let key = oldest.map(|(key, _)| key.clone())?;
        let unanswered = self.unanswered.remove(&key)?;
        self.release_token(unanswered.token);
        unanswered.stream
    }

    /// A call with this token is over.
    fn release_token(&mut self, token: Option<IdKey>) {
        let Some(token) = token else {
            return;
        };
        if let Entry::Occupied(mut owner) = self.tokens.entry(token) {
            owner.get_mut().calls -= 1;
            if owner.get().calls == 0 {
                owner.remove();
            }
        }
    }
}
