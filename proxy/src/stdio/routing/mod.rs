//! Finds the stream for each line from the server, without doing I/O or reading a clock.
//!
//! On stdio, all of a session's calls share one pipe, and only a few kinds of lines identify their call. These are the rules:
//!
//! 1. **An answer** is sent to the call with its id, compared by value, and ends the call. A second answer is dropped. At most
//!    one call can have a given id, because a request is refused if the server might confuse its id with the id of an earlier
//!    unanswered request. `"7"` also answers 7, and 7 answers `"7"`, but only if the client has never sent an id of the
//!    answer's type. Otherwise, the answer might be the second answer to another call.
//! 2. **Progress** is sent to the call with its token. As soon as two calls share a token, its progress is sent to the
//!    standalone stream, until all calls with the token have ended. Progress with an unknown token is also sent there.
//! 3. **Any other message** is sent to the open call if there is exactly one, and to the standalone stream otherwise. The session
//!    task makes two exceptions:
//!    - If the only call's client has disconnected, the message is sent to the standalone stream after all, provided that a
//!      client is reading that stream or that the call's stream can't be resumed.
//!    - If no client is reading the standalone stream, a server's request is sent to the newest of the open calls whose stream
//!      a client is reading.
//! 4. **A cancellation** from the client closes the call. After that, the call only receives its answer, and only within
//!    [`UPSTREAM_LINGER`]. Its id and its token remain taken, because the server may still use them.
//! 5. **Cancelled calls are bounded.** Only the newest [`MAX_UNANSWERED`] unanswered calls are remembered.
//! 6. **When the session ends**, each stream that is still open is returned once. After that, no call can start.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use tokio::time::Instant;

pub use crate::event_store::UPSTREAM_LINGER;
use crate::message::{IdKey, Kind, LooseIdKey, Message};

/// Maximum number of open calls in a session.
pub const MAX_OPEN: usize = 1024;

/// Maximum number of cancelled calls remembered until the server answers them.
///
/// There has to be a limit, because most servers never answer them.
pub const MAX_UNANSWERED: usize = 1024;

/// The calls of one session, each with its stream.
#[derive(Debug)]
pub struct Routes<S> {
    open: HashMap<LooseIdKey, Call<S>>,
    /// Total number of calls started so far.
    begun: u64,
    unanswered: HashMap<LooseIdKey, Unanswered<S>>,
    tokens: HashMap<IdKey, Owner>,
    kill_after: Option<Duration>,
    /// Whether the client has sent a string id.
    has_sent_text: bool,
    /// Whether the client has sent a numeric id.
    has_sent_number: bool,
    has_ended: bool,
}

/// Where a message from the server is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route<S> {
    /// To this call's stream. The message is the answer, so the call has ended.
    Answer(S),
    /// To this open call's stream.
    Call(S),
    /// To the session's standalone stream.
    Standalone,
    /// Nowhere, because the message belongs to no stream.
    Dropped,
}

/// The reason a request was not sent to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// An unanswered request has this id, or one that the server might confuse with it.
    IdInUse,
    /// [`MAX_OPEN`] calls are already open.
    TooMany,
    /// The session has ended.
    Ended,
}

/// What is due, as returned by [`Routes::due`].
#[derive(Debug, PartialEq, Eq)]
pub struct Due<S> {
    /// The streams of cancelled calls, which must be closed now.
    pub closed: Vec<S>,
    /// Whether a cancelled call has not been answered in time.
    pub overdue: bool,
}

#[derive(Debug)]
struct Call<S> {
    /// A sequence number, larger than any earlier call's.
    number: u64,
    id: IdKey,
    token: Option<IdKey>,
    stream: S,
}

/// A cancelled call that has yet to be answered.
#[derive(Debug)]
struct Unanswered<S> {
    id: IdKey,
    token: Option<IdKey>,
    stream: Option<S>,
    cancelled_at: Instant,
    /// How long the process has been blocked since the cancellation.
    blocked_for: Duration,
    /// Whether the call can still become [overdue](Due::overdue).
    may_be_overdue: bool,
}

/// The calls that share a progress token.
#[derive(Debug)]
struct Owner {
    calls: usize,
    /// The only call with the token, or `None` once several calls have shared it.
    only: Option<LooseIdKey>,
}

// === impl Routes ===

impl<S: Clone> Routes<S> {
    /// Creates an empty set of routes.
    ///
    /// If `kill_after` is set, a cancelled call becomes overdue after that time. Otherwise, no call ever does.
    #[must_use]
    pub fn new(kill_after: Option<Duration>) -> Self {
        Self {
            open: HashMap::new(),
            begun: 0,
            unanswered: HashMap::new(),
            tokens: HashMap::new(),
            kill_after,
            has_sent_text: false,
            has_sent_number: false,
            has_ended: false,
        }
    }

    /// Registers a request about to be sent to the server.
    ///
    /// If the request may be sent, `stream` is called to create the call's stream. If that fails, the request is not registered.
    pub fn begin<E: From<Refused>>(
        &mut self,
        id: IdKey,
        token: Option<IdKey>,
        stream: impl FnOnce() -> Result<S, E>,
    ) -> Result<S, E> {
        let key = id.loose();
        if self.has_ended {
            return Err(Refused::Ended.into());
        }
        // The server may still answer the cancelled call with this id.
        if self.unanswered.contains_key(&key) {
            return Err(Refused::IdInUse.into());
        }
        let open_calls = self.open.len();
        let Entry::Vacant(vacant) = self.open.entry(key.clone()) else {
            return Err(Refused::IdInUse.into());
        };
        if open_calls >= MAX_OPEN {
            return Err(Refused::TooMany.into());
        }
        let stream = stream()?;
        if id.is_text() {
            self.has_sent_text = true
        } else {
            self.has_sent_number = true
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
        self.begun += 1;
        let call = Call {
            number: self.begun,
            id,
            token,
            stream: stream.clone(),
        };
        vacant.insert(call);
        Ok(stream)
    }

    /// Returns where to send a message from the server. An answer ends its call.
    pub fn route(&mut self, message: &Message<'_>) -> Route<S> {
        if message.kind == Kind::Response {
            return message
                .id
                .and_then(IdKey::of)
                .map_or(Route::Dropped, |id| self.on_answered(&id));
        }
        if message.method.as_deref() == Some("notifications/progress") {
            return self.route_progress(message);
        }
        let mut open = self.open.values();
        match (open.next(), open.next()) {
            (Some(only), None) => Route::Call(only.stream.clone()),
            _ => Route::Standalone,
        }
    }

    /// Returns the stream of the newest open call whose stream satisfies `is_read`.
    pub fn newest(&self, is_read: impl Fn(&S) -> bool) -> Option<S> {
        let read = self.open.values().filter(|call| is_read(&call.stream));
        let newest = read.max_by_key(|call| call.number);
        newest.map(|call| call.stream.clone())
    }

    fn route_progress(&self, message: &Message<'_>) -> Route<S> {
        let token = message.params().progress_token.and_then(IdKey::of);
        let owner = token.and_then(|token| self.tokens.get(&token));
        let Some(key) = owner.and_then(|owner| owner.only.as_ref()) else {
            return Route::Standalone;
        };
        let call = self.open.get(key);
        // If the call is not open, it has been cancelled.
        call.map_or(Route::Dropped, |call| Route::Call(call.stream.clone()))
    }

    /// Ends the call with this id, and returns where to send its answer.
    ///
    /// If there is no such call, the answer is dropped.
    pub fn on_answered(&mut self, id: &IdKey) -> Route<S> {
        let has_sent_type = if id.is_text() {
            self.has_sent_text
        } else {
            self.has_sent_number
        };
        // Don't convert an id of a type that the client has sent, because this might be the second answer to another call.
        match id.counterpart().filter(|_| !has_sent_type) {
            Some(counterpart) => self.end_call(&counterpart),
            None => self.end_call(id),
        }
    }

    /// Ends the call with exactly this id, without converting the id to another type.
    fn end_call(&mut self, id: &IdKey) -> Route<S> {
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

    /// Marks the open call with this id, if any, as cancelled.
    ///
    /// If this evicts an older cancelled call, returns that call's stream, unless the stream is already closed.
    pub fn on_cancelled(&mut self, id: &IdKey, now: Instant) -> Option<S> {
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
            cancelled_at: now,
            blocked_for: Duration::ZERO,
            may_be_overdue: self.kill_after.is_some(),
        };
        self.unanswered.insert(key, unanswered);
        evicted
    }

    /// Returns when to call [`due`](Self::due) next, or `None` if nothing will be due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let due = self.unanswered.values().flat_map(|unanswered| {
            let closed = unanswered
                .stream
                .as_ref()
                .map(|_| unanswered.cancelled_at + UPSTREAM_LINGER);
            let kill = self
                .kill_after
                .filter(|_| unanswered.may_be_overdue)
                .map(|after| unanswered.cancelled_at + unanswered.blocked_for + after);
            [closed, kill]
        });
        due.flatten().min()
    }

    /// Records that the process was just blocked for this long, and so could not answer.
    ///
    /// This time is not counted toward [`Due::overdue`].
    pub fn add_blocked_time(&mut self, now: Instant, blocked: Duration) {
        for unanswered in self.unanswered.values_mut() {
            unanswered.blocked_for += blocked.min(now - unanswered.cancelled_at);
        }
    }

    /// Returns what is due. Each item is returned only once.
    ///
    /// No call is overdue while the process is blocked. Once the process is unblocked, [add the time](Self::add_blocked_time)
    /// for which it was blocked.
    pub fn due(&mut self, now: Instant, is_blocked: bool) -> Due<S> {
        let mut due = Due {
            closed: Vec::new(),
            overdue: false,
        };
        for unanswered in self.unanswered.values_mut() {
            if unanswered.cancelled_at + UPSTREAM_LINGER <= now {
                due.closed.extend(unanswered.stream.take());
            }
            let is_overdue = self.kill_after.is_some_and(|after| {
                !is_blocked && unanswered.cancelled_at + unanswered.blocked_for + after <= now
            });
            if is_overdue && std::mem::take(&mut unanswered.may_be_overdue) {
                due.overdue = true;
            }
        }
        due
    }

    /// Ends all calls and returns their streams. No call can start afterwards.
    pub fn end(&mut self) -> Vec<S> {
        self.has_ended = true;
        self.tokens.clear();
        let unanswered = self
            .unanswered
            .drain()
            .filter_map(|(_, unanswered)| unanswered.stream);
        let open = self.open.drain().map(|(_, call)| call.stream);
        open.chain(unanswered).collect()
    }

    /// Returns the streams of the open calls.
    pub fn streams(&self) -> impl Iterator<Item = &S> {
        self.open.values().map(|call| &call.stream)
    }

    /// Returns `true` if no call is open.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Evicts the oldest unanswered call, and returns its stream if that is still open.
    fn evict_oldest(&mut self) -> Option<S> {
        let oldest = self
            .unanswered
            .iter()
            .min_by_key(|(_, unanswered)| unanswered.cancelled_at);
        let key = oldest.map(|(key, _)| key.clone())?;
        let unanswered = self.unanswered.remove(&key)?;
        self.release_token(unanswered.token);
        unanswered.stream
    }

    /// Releases an ended call's token.
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
