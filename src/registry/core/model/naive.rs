//! A slow and simple model of the registry's rules, which just searches lists.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    super::{
        DetachOutcome, DetachedState, Expired, RetainedOutcome, UNOBSERVED_TTL,
        call_timers::MAX_EMPTY_RESUMES,
    },
    Decision, unobserved,
};
use crate::call::{CallId, Detachment, RequestId};

// The rules' constants, repeated so that a wrong one in the registry is noticed.
const MAX_RESUME_WAIT: Duration = Duration::from_secs(5);
const STALL_THRESHOLD: Duration = Duration::from_secs(1);
const TIMER_RESOLUTION: Duration = Duration::from_millis(2);
const RECHECK_DELAY: Duration = Duration::from_millis(100);
const RECHECK_TOLERANCE: Duration = Duration::from_millis(20);
const MAX_RECHECKS: usize = 10;
const MIN_STALL_EXTENSION: Duration = Duration::from_secs(5);
const MAX_EVENT_IDS: usize = 256;
const MAX_DELIVERED: usize = 64;

/// An answer is identified by its number.
pub(super) type Answer = u32;

/// What an event id refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stream {
    /// rmcp's `<n>/<m>`, by `m`.
    Numbered(u64),
    Opaque(u32),
    /// `<index>/<stream>` from a server that gives its ids a meaning of its own: stream and index.
    Event(u64, u32),
}

/// What an event id matches.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Match {
    Nothing,
    Call(CallId),
    Ambiguous(Vec<CallId>),
    Ended(RetainedOutcome<Answer>),
}

/// A call's completion, to be retained.
#[derive(Debug, Clone)]
pub(super) struct Completed {
    pub(super) end: RetainedOutcome<Answer>,
    pub(super) units: usize,
    pub(super) at: Instant,
    pub(super) until: Instant,
}

#[derive(Debug)]
pub(super) struct Model {
    /// Capacity for retained answers, in units of an answer's size.
    capacity: usize,
    /// The calls in flight, oldest first.
    calls: Vec<Call>,
    /// The retained answers, ordered by when they expire.
    retained: Vec<RetainedAnswer>,
    /// Calls whose answers were evicted although their clients may resume. The evictions are yet to be reported.
    evicted: Vec<CallId>,
}

#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: CallId,
    scope: usize,
    request: RequestId,
    is_accepted: bool,
    /// Number of accepted resumes.
    resumes: usize,
    /// The open streams. The POST's stream is 0, and each resume gets the next number.
    streams: Vec<usize>,
    state: Option<DetachedState>,
    /// Maximum time until its client resumes.
    resume_window: Duration,
    /// Whether the call keeps running when it is detached.
    may_have_been_resumed: bool,
    detachment: Option<Detachment>,
    was_postponed: bool,
    /// The times of the rechecks that are due because the grace period was found expired late.
    rechecks: Vec<Instant>,
    /// When the last pending resume ended, or its deadline if that is earlier.
    resumes_ended_at: Option<Instant>,
    pending_resumes: usize,
    background_readers: usize,
    /// When the call is removed. `None` unless its last background reader ended while it was detached.
    unobserved_until: Option<Instant>,
    /// Whether the grace period has expired, so that the call is about to be cancelled.
    is_expired: bool,
    /// Number of times the grace period has expired.
    expiry_count: usize,
    /// Whether the cancellation has been confirmed.
    is_confirmed: bool,
    empty_resumes: u32,
    last_deadline: Option<Instant>,
    /// The call's deadline, attached or not.
    pub(super) deadline: Option<Instant>,
    event_ids: Vec<Stream>,
}

#[derive(Debug)]
struct RetainedAnswer {
    id: CallId,
    scope: usize,
    event_ids: Vec<Stream>,
    completed: Completed,
    /// Whether the answer has not been delivered.
    undelivered: bool,
    was_postponed: bool,
}

// === impl Match ===

impl Match {
    /// Returns the calls that may match.
    pub(super) fn in_flight(&self) -> &[CallId] {
        match self {
            Self::Call(id) => std::slice::from_ref(id),
            Self::Ambiguous(ids) => ids,
            Self::Nothing | Self::Ended(_) => &[],
        }
    }
}

// === impl Model ===

impl Model {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            calls: Vec::new(),
            retained: Vec::new(),
            evicted: Vec::new(),
        }
    }

    pub(super) fn calls(&self) -> &[Call] {
        &self.calls
    }

    pub(super) fn get(&self, id: CallId) -> Option<&Call> {
        self.calls.iter().find(|call| call.id == id)
    }

    fn get_mut(&mut self, id: CallId) -> Option<&mut Call> {
        self.calls.iter_mut().find(|call| call.id == id)
    }

    fn remove(&mut self, id: CallId) -> Option<Call> {
        let index = self.calls.iter().position(|call| call.id == id)?;
        Some(self.calls.remove(index))
    }

    pub(super) fn start(
        &mut self,
        id: CallId,
        (scope, request): (usize, RequestId),
        deadline: Option<Instant>,
    ) {
        self.calls.push(Call {
            id,
            scope,
            request,
            is_accepted: false,
            resumes: 0,
            streams: vec![0],
            state: None,
            resume_window: Duration::ZERO,
            may_have_been_resumed: false,
            detachment: None,
            was_postponed: false,
            rechecks: Vec::new(),
            resumes_ended_at: None,
            pending_resumes: 0,
            background_readers: 0,
            unobserved_until: None,
            is_expired: false,
            expiry_count: 0,
            is_confirmed: false,
            empty_resumes: 0,
            last_deadline: None,
            deadline,
            event_ids: Vec::new(),
        });
    }

    /// Rules 1 and 9. Returns the call that is untracked.
    pub(super) fn accept(&mut self, id: CallId) -> Option<CallId> {
        let call = self.get_mut(id)?;
        let (scope, request) = (call.scope, call.request.clone());
        call.is_accepted = true;
        let older = self
            .calls
            .iter()
            .find(|call| call.id != id && call.is_accepted && call.has_key(scope, &request))?;
        let older = older.id;
        self.remove(older);
        Some(older)
    }

    /// Moves a call to another key, and removes its event ids.
    pub(super) fn rekey(
        &mut self,
        id: CallId,
        (scope, request): (usize, RequestId),
    ) -> Option<CallId> {
        let call = self.get_mut(id)?;
        (call.scope, call.request) = (scope, request);
        call.is_accepted = false;
        call.event_ids.clear();
        self.accept(id)
    }

    /// Rule 8.
    pub(super) fn record_event_id(&mut self, id: CallId, stream: Stream) {
        let call = self.get_mut(id);
        if let Some(call) = call.filter(|call| !call.has_event_id(stream)) {
            call.event_ids.push(stream);
        }
    }

    /// Rules 4, 5 and 6.
    pub(super) fn detach(
        &mut self,
        id: CallId,
        stream: usize,
        state: DetachedState,
        resumed_without_events: bool,
        detachment: Detachment,
    ) -> DetachOutcome {
        let Some(call) = self.get_mut(id) else {
            return DetachOutcome::Ignored;
        };
        let before = call.streams.len();
        call.streams.retain(|other| *other != stream);
        if call.streams.len() == before || !call.streams.is_empty() {
            return DetachOutcome::Ignored;
        }
        call.empty_resumes = if resumed_without_events {
            call.empty_resumes + 1
        } else {
            0
        };
        call.was_postponed = false;
        call.rechecks.clear();
        call.resumes_ended_at = None;
        call.unobserved_until = None;
        call.state = Some(state);
        call.resume_window = match state {
            DetachedState::GraceUntil { deadline, .. } => deadline - detachment.detached_at(),
            DetachedState::UntilComplete { resume_window }
            | DetachedState::ForgetAt { resume_window, .. } => resume_window,
        };
        call.detachment = Some(detachment);
        if let DetachedState::GraceUntil { deadline, retry } = state {
            let renewed = call.empty_resumes <= MAX_EMPTY_RESUMES;
            let deadline = match call.last_deadline {
                Some(last) if !renewed => last.min(deadline),
                _ => deadline,
            };
            call.state = Some(DetachedState::GraceUntil { deadline, retry });
            call.last_deadline = Some(deadline);
        }
        call.is_confirmed = false;
        call.is_expired = call.due().is_some_and(|at| at <= detachment.detached_at());
        call.expiry_count += usize::from(call.is_expired);
        if call.is_expired {
            DetachOutcome::CancelNow
        } else {
            DetachOutcome::Waiting
        }
    }

    /// Returns `true` if the call is in flight.
    pub(super) fn attach(&mut self, id: CallId) -> bool {
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        call.resumes += 1;
        call.streams.push(call.resumes);
        call.may_have_been_resumed = false;
        call.state = None;
        call.detachment = None;
        call.is_expired = false;
        true
    }

    /// Rules 5 and 7. A resume that finds a grace period expired late shows that the runtime has been stalled.
    pub(super) fn begin_resume(&mut self, id: CallId, now: Instant) -> bool {
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        if call.pending_resumes == 0 {
            call.postpone_if_late(now);
        }
        call.pending_resumes += 1;
        call.is_expired = false;
        call.is_confirmed = false;
        true
    }

    /// Rule 6.
    pub(super) fn renew_grace(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.get_mut(id) else {
            return;
        };
        let window = call.resume_window;
        if call.empty_resumes < MAX_EMPTY_RESUMES
            && let Some(DetachedState::GraceUntil { deadline, .. }) = &mut call.state
        {
            *deadline = (now + window).max(*deadline);
            call.last_deadline = Some(*deadline);
            call.empty_resumes += 1;
        }
    }

    pub(super) fn end_resume(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.get_mut(id).filter(|call| call.pending_resumes > 0) else {
            return;
        };
        call.pending_resumes -= 1;
        if call.pending_resumes > 0 {
            return;
        }
        call.is_expired = false;
        call.is_confirmed = false;
        if let Some(DetachedState::GraceUntil { deadline, .. }) = call.state {
            call.resumes_ended_at = Some(now.min(deadline + MAX_RESUME_WAIT));
        }
    }

    pub(super) fn mark_maybe_resumed(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.get_mut(id) else {
            return;
        };
        call.may_have_been_resumed = true;
        if call.state.is_some() {
            let state = unobserved(now);
            if let DetachedState::ForgetAt { resume_window, .. } = state {
                call.resume_window = call.resume_window.max(resume_window);
            }
            call.state = Some(state);
            call.is_expired = false;
        }
    }

    pub(super) fn may_have_been_resumed(&self, id: CallId) -> bool {
        self.get(id).is_some_and(|call| call.may_have_been_resumed)
    }

    pub(super) fn add_background_reader(&mut self, id: CallId) {
        if let Some(call) = self.get_mut(id) {
            call.background_readers += 1;
            call.unobserved_until = None;
        }
    }

    pub(super) fn remove_background_reader(&mut self, id: CallId, now: Instant) {
        if let Some(call) = self.get_mut(id) {
            call.background_readers = call.background_readers.saturating_sub(1);
            if call.background_readers == 0
                && call.state.is_some()
                && call.unobserved_until.is_none()
            {
                call.unobserved_until = Some(now + UNOBSERVED_TTL);
            }
        }
    }

    /// Rule 6. Returns `true` if an earlier decision to cancel still holds.
    pub(super) fn is_due(&self, id: CallId) -> bool {
        self.get(id).is_some_and(|call| call.is_expired)
    }

    /// Returns the expiry for which the cancellation was decided on, or `None` if it no longer holds.
    pub(super) fn expiry(&self, id: CallId) -> Option<usize> {
        let call = self.get(id).filter(|call| call.is_expired)?;
        Some(call.expiry_count)
    }

    /// Rule 6: a confirmation counts only for the expiry that requested it.
    pub(super) fn confirm(
        &mut self,
        id: CallId,
        expiry: usize,
        decision: Decision,
        now: Instant,
    ) -> bool {
        if self.expiry(id) != Some(expiry) {
            return false;
        }
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        call.is_expired = false;
        match decision {
            Decision::Cancel => {
                call.is_confirmed = true;
                call.rechecks.push(now + RECHECK_DELAY);
            }
            Decision::Postpone { wait_ms } => {
                let until = now + Duration::from_millis(wait_ms);
                call.is_confirmed = false;
                call.was_postponed = false;
                call.rechecks.clear();
                call.last_deadline = Some(until);
                if let Some(DetachedState::GraceUntil { deadline, .. }) = &mut call.state {
                    *deadline = until;
                }
            }
        }
        true
    }

    /// Rules 3 and 14. Returns `true` if no client has the call, is about to resume it, or may have resumed it unobserved.
    pub(super) fn may_cancel(&self, id: CallId) -> bool {
        self.get(id).is_some_and(|call| {
            call.state.is_some() && call.pending_resumes == 0 && !call.may_have_been_resumed
        })
    }

    /// Rules 2 and 11. Returns whether a cancellation may be injected.
    pub(super) fn finish(&mut self, id: CallId, completed: Option<Completed>) -> Option<bool> {
        let call = self.remove(id)?;
        let has_same_key = |other: &Call| other.has_key(call.scope, &call.request);
        let may_cancel_server = call.is_accepted || !self.calls.iter().any(has_same_key);
        if let Some(mut completed) = completed.filter(|_| !call.event_ids.is_empty()) {
            if call.state.is_some() {
                completed.until = completed.until.max(completed.at + call.resume_window);
            }
            if let Some(DetachedState::GraceUntil { deadline, .. }) = call.state {
                completed.until = completed.until.max(deadline);
            }
            let event_ids = call.known_event_ids().collect();
            let answered = matches!(completed.end, RetainedOutcome::Answered(_));
            self.retain_answer(RetainedAnswer {
                id,
                scope: call.scope,
                event_ids,
                completed,
                undelivered: !answered || call.state.is_some(),
                was_postponed: false,
            });
        }
        Some(may_cancel_server)
    }

    /// Rule 11. If there is too little space for an answer, the expired ones are removed. If it still cannot fit, it is not retained.
    /// Otherwise, delivered answers are evicted first, then undelivered ones, in each case in the order in which they expire. No undelivered
    /// answer is evicted for a delivered one, and only a few delivered answers are retained.
    fn retain_answer(&mut self, new: RetainedAnswer) {
        if self.is_full_for(&new) {
            let now = new.completed.at;
            while self.retained.first().is_some_and(|first| {
                let until = first.completed.until;
                until <= now && (first.was_postponed || now - until <= STALL_THRESHOLD)
            }) {
                self.retained.remove(0);
            }
        }
        let units_to_keep = if new.undelivered { 0 } else { self.units(true) };
        if new.completed.units + units_to_keep > self.capacity {
            if new.undelivered {
                self.evicted.push(new.id);
            }
            return;
        }
        while self.is_full_for(&new) {
            let first = |undelivered: bool| {
                self.retained
                    .iter()
                    .position(|retained| retained.undelivered == undelivered)
            };
            let index = first(false).or_else(|| first(true)).unwrap();
            let evicted = self.retained.remove(index);
            if evicted.undelivered {
                self.evicted.push(evicted.id);
            }
        }
        self.retained.push(new);
        self.sort_retained();
    }

    fn sort_retained(&mut self) {
        self.retained
            .sort_by_key(|retained| retained.completed.until);
    }

    fn is_full_for(&self, new: &RetainedAnswer) -> bool {
        self.units(false) + self.units(true) + new.completed.units > self.capacity
            || !new.undelivered && self.delivered() >= MAX_DELIVERED
    }

    fn delivered(&self) -> usize {
        self.retained
            .iter()
            .filter(|retained| !retained.undelivered)
            .count()
    }

    fn units(&self, undelivered: bool) -> usize {
        let counted = self
            .retained
            .iter()
            .filter(|retained| retained.undelivered == undelivered);
        counted.map(|retained| retained.completed.units).sum()
    }

    pub(super) fn take_evicted(&mut self) -> Vec<CallId> {
        std::mem::take(&mut self.evicted)
    }

    /// Rule 12. Returns the accepted calls, and removes their event ids along with the retained calls.
    pub(super) fn begin_close(&mut self, scope: usize) -> Vec<CallId> {
        self.retained.retain(|retained| retained.scope != scope);
        let in_scope = self.calls.iter_mut().filter(|call| call.scope == scope);
        let accepted = in_scope.filter(|call| call.is_accepted);
        let taken = accepted.map(|call| {
            call.event_ids.clear();
            call.id
        });
        taken.collect()
    }

    /// Rules 3, 7, 11 and 13. Returns the calls whose deadline has passed, and the orphans.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<(CallId, Expired)> {
        let retained = std::mem::take(&mut self.retained).into_iter();
        let (expired, kept) =
            retained.partition(|retained: &RetainedAnswer| retained.completed.until <= now);
        self.retained = kept;
        for mut answer in expired {
            if now > answer.completed.until + STALL_THRESHOLD && !answer.was_postponed {
                answer.completed.until = now + MAX_RESUME_WAIT;
                answer.was_postponed = true;
                self.retained.push(answer);
            }
        }
        self.sort_retained();
        let mut expired_calls = Vec::new();
        self.calls.retain_mut(|call| {
            if call.deadline.is_some_and(|at| at <= now) {
                expired_calls.push((call.id, Expired::Deadline));
                return true;
            }
            if !call.is_due(now) {
                return true;
            }
            if let Some(DetachedState::ForgetAt { .. } | DetachedState::UntilComplete { .. }) =
                call.state
            {
                return false;
            }
            if !call.postpone_if_late(now) {
                call.is_expired = true;
                call.expiry_count += 1;
                expired_calls.push(if call.is_confirmed {
                    (call.id, Expired::GraceConfirmed)
                } else {
                    (call.id, Expired::Grace)
                });
            }
            true
        });
        expired_calls
    }

    /// Returns the earliest deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let calls = self.calls.iter().filter_map(Call::scheduled);
        let retained = self.retained.iter();
        calls
            .chain(retained.map(|retained| retained.completed.until))
            .min()
    }

    /// Returns the number of deadlines.
    pub(super) fn deadline_count(&self) -> usize {
        let calls = self.calls.iter().filter_map(Call::scheduled);
        calls.count() + self.retained.len()
    }

    pub(super) fn find(&self, scope: usize, request: &RequestId) -> Option<CallId> {
        let mut accepted = self.calls.iter().filter(|call| call.is_accepted);
        let found = accepted.find(|call| call.has_key(scope, request));
        found.map(|call| call.id)
    }

    pub(super) fn detachment(&self, id: CallId) -> Option<Detachment> {
        self.get(id)?.detachment
    }

    pub(super) fn detached(&self, scope: usize) -> Vec<CallId> {
        let in_scope = self.calls.iter().filter(|call| call.scope == scope);
        let detached = in_scope.filter(|call| call.state.is_some());
        detached.map(|call| call.id).collect()
    }

    /// Rule 8. Returns what an event id matches.
    pub(super) fn match_event(&self, scope: usize, stream: Stream) -> Match {
        let ids_of = |is_match: &dyn Fn(&Call) -> bool| {
            let in_scope = self.calls.iter().filter(|call| call.scope == scope);
            let mut ids: Vec<_> = in_scope
                .filter(|call| is_match(call))
                .map(|call| call.id)
                .collect();
            ids.sort_unstable();
            ids
        };
        let in_flight = ids_of(&|call| call.has_event_id(stream));
        match in_flight[..] {
            [] => {}
            [id] => return Match::Call(id),
            _ => return Match::Ambiguous(in_flight),
        }
        let matching = self
            .retained
            .iter()
            .filter(|retained| retained.scope == scope && retained.event_ids.contains(&stream));
        if let Some(retained) = matching.max_by_key(|retained| retained.id) {
            return Match::Ended(retained.completed.end.clone());
        }
        let possible = ids_of(&|call| call.may_have_had(stream));
        if possible.is_empty() {
            Match::Nothing
        } else {
            Match::Ambiguous(possible)
        }
    }

    /// Returns `true` if a call has had more event ids than it stores.
    pub(super) fn has_forgotten_ids(&self, id: CallId) -> bool {
        let call = self.get(id);
        call.is_some_and(|call| call.forgotten_event_ids().next().is_some())
    }

    pub(super) fn retained_calls(&self) -> impl Iterator<Item = CallId> {
        self.retained.iter().map(|retained| retained.id)
    }
}

// === impl Call ===

impl Call {
    fn has_key(&self, scope: usize, request: &RequestId) -> bool {
        self.scope == scope && self.request == *request
    }

    pub(super) fn is_attached(&self) -> bool {
        self.state.is_none()
    }

    /// Returns `true` if a pending resume keeps the call from being cancelled.
    pub(super) fn has_pending_resume_at(&self, now: Instant) -> bool {
        let has_pending_resume = self.pending_resumes > 0;
        match self.state {
            Some(DetachedState::GraceUntil { deadline, .. }) => {
                has_pending_resume && now < deadline + MAX_RESUME_WAIT
            }
            _ => has_pending_resume,
        }
    }

    fn due(&self) -> Option<Instant> {
        match self.state? {
            DetachedState::GraceUntil { deadline, .. } => {
                let resume_deadline =
                    (self.pending_resumes > 0).then_some(deadline + MAX_RESUME_WAIT);
                let others = resume_deadline.or(self.resumes_ended_at).into_iter();
                let recheck = self.rechecks.last().copied();
                others.chain(recheck).chain([deadline]).max()
            }
            DetachedState::ForgetAt { until, .. } => Some(until).max(self.deadline),
            DetachedState::UntilComplete { .. } => self
                .unobserved_until
                .map(|at| at.max(self.deadline.unwrap_or(at))),
        }
    }

    fn scheduled(&self) -> Option<Instant> {
        let due = self.due().filter(|_| !self.is_expired);
        due.into_iter().chain(self.deadline).min()
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|at| at <= now && !self.is_expired)
    }

    /// Rule 7. Postpones the call if its grace period has been found expired late. Returns `true` if it was postponed.
    fn postpone_if_late(&mut self, now: Instant) -> bool {
        let Some(due) = self.due() else {
            return false;
        };
        let Some(DetachedState::GraceUntil { deadline, retry }) = &mut self.state else {
            return false;
        };
        if now > due + STALL_THRESHOLD && !self.was_postponed {
            self.was_postponed = true;
            self.is_confirmed = false;
            *deadline = now + (2 * *retry).max(MIN_STALL_EXTENSION);
            self.last_deadline = Some(*deadline);
            return true;
        }
        let is_recheck = self.rechecks.contains(&due);
        let on_time = now <= due + TIMER_RESOLUTION || is_recheck && now <= due + RECHECK_TOLERANCE;
        if on_time || self.rechecks.len() == MAX_RECHECKS {
            return false;
        }
        self.rechecks.push(now + RECHECK_DELAY);
        self.last_deadline = Some(now + RECHECK_DELAY);
        true
    }

    fn has_event_id(&self, stream: Stream) -> bool {
        self.known_event_ids().any(|known| known == stream)
    }

    /// Returns `true` if the call had this event id, or if it had a stream in rmcp's format that it no longer stores.
    fn may_have_had(&self, stream: Stream) -> bool {
        self.forgotten_event_ids()
            .any(|forgotten| forgotten == stream || matches!(forgotten, Stream::Numbered(_)))
    }

    /// Returns the first event id and the latest ones.
    fn known_event_ids(&self) -> impl Iterator<Item = Stream> {
        let latest = self.event_ids.len().saturating_sub(MAX_EVENT_IDS);
        let event_ids = self.event_ids.iter().enumerate();
        let known = event_ids.filter(move |(at, _)| *at == 0 || *at >= latest);
        known.map(|(_, stream)| *stream)
    }

    /// Returns the event ids in between.
    fn forgotten_event_ids(&self) -> impl Iterator<Item = Stream> {
        let latest = self.event_ids.len().saturating_sub(MAX_EVENT_IDS);
        let forgotten = self.event_ids.iter().take(latest).skip(1);
        forgotten.copied()
    }
}
