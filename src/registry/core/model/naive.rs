//! The rules of the design as the slow and simple way has them: by linear search.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    super::{
        DetachOutcome, DetachedState, Expired, RetainedOutcome, UNOBSERVED_TTL,
        call_timers::MAX_EMPTY_RESUMES,
    },
    Answering, unseen,
};
use crate::call::{CallId, Detachment, RequestId};

// The numbers of the rules, on purpose not those of the core.
const MAX_HOLD: Duration = Duration::from_secs(5);
const LATE: Duration = Duration::from_secs(1);
const A_LITTLE_LATE: Duration = Duration::from_millis(2);
const LOOK_AGAIN: Duration = Duration::from_millis(100);
const LOOK_AGAIN_LATE: Duration = Duration::from_millis(20);
const MAX_LOOKS: usize = 10;
const MIN_PUT_OFF: Duration = Duration::from_secs(5);
const MAX_EVENT_IDS: usize = 1_024;

/// An answer is told by its number.
pub(super) type Answer = u32;

/// What an event id stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stream {
    /// rmcp's `<n>/<m>`, by `m`.
    Numbered(u64),
    Opaque(u32),
    /// `<index>/<stream>` of a server that may mean anything by it: stream and index.
    Event(u64, u32),
}

/// What an event id names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named {
    Nothing,
    Call(CallId),
    OneOf(Vec<CallId>),
    Ended(RetainedOutcome<Answer>),
}

/// A call that ends and is to be remembered.
#[derive(Debug, Clone)]
pub(super) struct Remember {
    pub(super) end: RetainedOutcome<Answer>,
    pub(super) units: usize,
    pub(super) at: Instant,
    pub(super) until: Instant,
}

#[derive(Debug)]
pub(super) struct Model {
    /// How much may be remembered, in units of an answer's size.
    room: usize,
    /// Oldest first.
    calls: Vec<Call>,
    /// In the order of their ends.
    kept: Vec<Kept>,
    /// Whose records had to go though their clients may come for them, and was not asked yet.
    dropped: Vec<CallId>,
    /// Streams that two calls go by, which MCP forbids. Either may be found, or both, or none.
    contested: Vec<(usize, Stream)>,
}

#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: CallId,
    scope: usize,
    request: RequestId,
    accepted: bool,
    /// How many resumes were accepted.
    resumes: usize,
    /// The streams that live: the POST's is 0, that of each resume the next.
    streams: Vec<usize>,
    wait: Option<DetachedState>,
    /// How long its client may stay away.
    patience: Duration,
    /// It is to run on when its client goes.
    spared: bool,
    detachment: Option<Detachment>,
    put_off: bool,
    /// When it was, or is, looked at again because somebody noticed late that its time was over.
    looks: Vec<Instant>,
    /// When a hold was let go last, at most until when it could have lasted.
    released: Option<Instant>,
    holds: usize,
    readers: usize,
    /// When it is forgotten, if it waits for its end and nobody reads.
    unwatched: Option<Instant>,
    /// Somebody was told to end it.
    given_out: bool,
    /// How often somebody was.
    dues: usize,
    /// It was said that it may be ended.
    confirmed: bool,
    barren: u32,
    last_deadline: Option<Instant>,
    /// When it is cancelled at the latest.
    pub(super) may_last_to: Option<Instant>,
    names: Vec<Stream>,
}

#[derive(Debug)]
struct Kept {
    id: CallId,
    scope: usize,
    names: Vec<Stream>,
    remember: Remember,
    /// Nobody was there to take the answer.
    owed: bool,
}

// === impl Model ===

impl Model {
    pub(super) fn new(room: usize) -> Self {
        Self {
            room,
            calls: Vec::new(),
            kept: Vec::new(),
            dropped: Vec::new(),
            contested: Vec::new(),
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
        let at = self.calls.iter().position(|call| call.id == id)?;
        Some(self.calls.remove(at))
    }

    pub(super) fn start(
        &mut self,
        id: CallId,
        (scope, request): (usize, RequestId),
        may_last_to: Option<Instant>,
    ) {
        self.calls.push(Call {
            id,
            scope,
            request,
            accepted: false,
            resumes: 0,
            streams: vec![0],
            wait: None,
            patience: Duration::ZERO,
            spared: false,
            detachment: None,
            put_off: false,
            looks: Vec::new(),
            released: None,
            holds: 0,
            readers: 0,
            unwatched: None,
            given_out: false,
            dues: 0,
            confirmed: false,
            barren: 0,
            last_deadline: None,
            may_last_to,
            names: Vec::new(),
        });
    }

    /// Rules 1 and 9. Returns who leaves.
    pub(super) fn claim(&mut self, id: CallId) -> Option<CallId> {
        let call = self.get_mut(id)?;
        let (scope, request) = (call.scope, call.request.clone());
        call.accepted = true;
        let older = self
            .calls
            .iter()
            .find(|call| call.id != id && call.accepted && call.is(scope, &request))?;
        let older = older.id;
        self.remove(older);
        Some(older)
    }

    /// The same call under another name, without those of its streams.
    pub(super) fn rename(
        &mut self,
        id: CallId,
        (scope, request): (usize, RequestId),
    ) -> Option<CallId> {
        let call = self.get_mut(id)?;
        (call.scope, call.request) = (scope, request);
        call.accepted = false;
        call.names.clear();
        self.claim(id)
    }

    /// Rule 8.
    pub(super) fn name(&mut self, id: CallId, stream: Stream) {
        let call = self.get(id).filter(|call| !call.goes_by(stream));
        let Some(scope) = call.map(|call| call.scope) else {
            return;
        };
        if !self.holders(scope, stream).is_empty() {
            self.contested.push((scope, stream));
        }
        if let Some(call) = self.get_mut(id) {
            call.names.push(stream);
        }
    }

    /// Rules 4, 5 and 6.
    pub(super) fn detach(
        &mut self,
        id: CallId,
        stream: usize,
        wait: DetachedState,
        barren: bool,
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
        call.barren = if barren { call.barren + 1 } else { 0 };
        call.put_off = false;
        call.looks.clear();
        call.released = None;
        call.unwatched = None;
        call.wait = Some(wait);
        call.patience = match wait {
            DetachedState::GraceUntil { deadline, .. } => deadline - detachment.since(),
            DetachedState::UntilComplete {
                resume_window: patience,
            }
            | DetachedState::ForgetAt {
                resume_window: patience,
                ..
            } => patience,
        };
        call.detachment = Some(detachment);
        if let DetachedState::GraceUntil { deadline, retry } = wait {
            let renewed = call.barren <= MAX_EMPTY_RESUMES;
            let deadline = match call.last_deadline {
                Some(last) if !renewed => last.min(deadline),
                _ => deadline,
            };
            call.wait = Some(DetachedState::GraceUntil { deadline, retry });
            call.last_deadline = Some(deadline);
        }
        call.confirmed = false;
        call.given_out = call.due().is_some_and(|at| at <= detachment.since());
        call.dues += usize::from(call.given_out);
        if call.given_out {
            DetachOutcome::CancelNow
        } else {
            DetachOutcome::Waiting
        }
    }

    /// Whether it is in flight.
    pub(super) fn attach(&mut self, id: CallId) -> bool {
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        call.resumes += 1;
        call.streams.push(call.resumes);
        call.spared = false;
        call.wait = None;
        call.detachment = None;
        call.given_out = false;
        true
    }

    /// Rule 5, and rule 7: who comes late for a deadline that nobody else noticed shows that the
    /// runtime was starved.
    pub(super) fn hold(&mut self, id: CallId, now: Instant) -> bool {
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        if call.holds == 0 {
            call.waits_on(now);
        }
        call.holds += 1;
        call.given_out = false;
        call.confirmed = false;
        true
    }

    pub(super) fn release(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.get_mut(id).filter(|call| call.holds > 0) else {
            return;
        };
        call.holds -= 1;
        if call.holds > 0 {
            return;
        }
        call.given_out = false;
        call.confirmed = false;
        if let Some(DetachedState::GraceUntil { deadline, .. }) = call.wait {
            call.released = Some(now.min(deadline + MAX_HOLD));
        }
    }

    pub(super) fn spare(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.get_mut(id) else {
            return;
        };
        call.spared = true;
        if call.wait.is_some() {
            call.wait = Some(unseen(now));
            call.given_out = false;
        }
    }

    pub(super) fn is_spared(&self, id: CallId) -> bool {
        self.get(id).is_some_and(|call| call.spared)
    }

    pub(super) fn read_on(&mut self, id: CallId) {
        if let Some(call) = self.get_mut(id) {
            call.readers += 1;
            call.unwatched = None;
        }
    }

    pub(super) fn lose_sight(&mut self, id: CallId, now: Instant) {
        if let Some(call) = self.get_mut(id) {
            call.readers = call.readers.saturating_sub(1);
            if call.readers == 0 && call.wait.is_some() && call.unwatched.is_none() {
                call.unwatched = Some(now + UNOBSERVED_TTL);
            }
        }
    }

    /// Rule 6: whether a cancel that was decided before still holds.
    pub(super) fn is_due(&self, id: CallId) -> bool {
        self.get(id).is_some_and(|call| call.given_out)
    }

    /// Which time it is that somebody was told to end it, if that holds.
    pub(super) fn due(&self, id: CallId) -> Option<usize> {
        let call = self.get(id).filter(|call| call.given_out)?;
        Some(call.dues)
    }

    /// Rule 6: an answer counts only while the time stands that was asked about.
    pub(super) fn answer(
        &mut self,
        id: CallId,
        due: usize,
        answer: Answering,
        now: Instant,
    ) -> bool {
        if self.due(id) != Some(due) {
            return false;
        }
        let Some(call) = self.get_mut(id) else {
            return false;
        };
        call.given_out = false;
        match answer {
            Answering::Cancel => {
                call.confirmed = true;
                call.looks.push(now + LOOK_AGAIN);
            }
            Answering::PutOff { wait_ms } => {
                let until = now + Duration::from_millis(wait_ms);
                call.confirmed = false;
                call.put_off = false;
                call.looks.clear();
                call.last_deadline = Some(until);
                if let Some(DetachedState::GraceUntil { deadline, .. }) = &mut call.wait {
                    *deadline = until;
                }
            }
        }
        true
    }

    /// Rules 3 and 14: whether nobody has it, is about to, or may have it unseen.
    pub(super) fn is_alone(&self, id: CallId) -> bool {
        self.get(id)
            .is_some_and(|call| call.wait.is_some() && call.holds == 0 && !call.spared)
    }

    /// Rules 2 and 11. Returns whether a cancel may be injected.
    pub(super) fn finish(&mut self, id: CallId, remember: Option<Remember>) -> Option<bool> {
        let call = self.remove(id)?;
        let is_for_it = |other: &Call| other.is(call.scope, &call.request);
        let injectable = call.accepted || !self.calls.iter().any(is_for_it);
        if let Some(mut remember) = remember.filter(|_| !call.names.is_empty()) {
            if call.wait.is_some() {
                remember.until = remember.until.max(remember.at + call.patience);
            }
            if let Some(DetachedState::GraceUntil { deadline, .. }) = call.wait {
                remember.until = remember.until.max(deadline);
            }
            let names = call.known_names();
            let answered = matches!(remember.end, RetainedOutcome::Answered(_));
            self.keep(Kept {
                id,
                scope: call.scope,
                names,
                remember,
                owed: !answered || call.wait.is_some(),
            });
        }
        Some(injectable)
    }

    /// Rule 11: what cannot fit whatever goes is not kept. Else answers that were taken go, oldest first, and then the
    /// oldest of the others. Nothing that is owed goes for an answer that was taken.
    fn keep(&mut self, new: Kept) {
        let stays = if new.owed { 0 } else { self.units(true) };
        if new.remember.units + stays > self.room {
            if new.owed {
                self.dropped.push(new.id);
            }
            return;
        }
        self.kept.push(new);
        while self.units(false) + self.units(true) > self.room {
            let oldest = |owed: bool| self.kept.iter().position(|kept| kept.owed == owed);
            let goes = oldest(false).or_else(|| oldest(true)).unwrap();
            let gone = self.kept.remove(goes);
            if gone.owed {
                self.dropped.push(gone.id);
            }
        }
    }

    fn units(&self, owed: bool) -> usize {
        let counted = self.kept.iter().filter(|kept| kept.owed == owed);
        counted.map(|kept| kept.remember.units).sum()
    }

    pub(super) fn take_dropped(&mut self) -> Vec<CallId> {
        std::mem::take(&mut self.dropped)
    }

    /// Rule 12: the accepted calls, whose names are forgotten with what is remembered.
    pub(super) fn take_accepted(&mut self, scope: usize) -> Vec<CallId> {
        self.kept.retain(|kept| kept.scope != scope);
        let its = self.calls.iter_mut().filter(|call| call.scope == scope);
        let accepted = its.filter(|call| call.accepted);
        let taken = accepted.map(|call| {
            call.names.clear();
            call.id
        });
        taken.collect()
    }

    /// Rules 3, 7, 11 and 13. Returns the calls whose deadline has passed, and the orphans.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<(CallId, Expired)> {
        for owed in [false, true] {
            // One that stays longer keeps those behind it.
            let mut stays = false;
            self.kept.retain(|kept| {
                stays |= kept.owed == owed && kept.remember.until > now;
                kept.owed != owed || stays
            });
        }
        let mut over = Vec::new();
        self.calls.retain_mut(|call| {
            if call.may_last_to.is_some_and(|at| at <= now) {
                over.push((call.id, Expired::Deadline));
                return true;
            }
            if !call.is_due(now) {
                return true;
            }
            if let Some(DetachedState::ForgetAt { .. } | DetachedState::UntilComplete { .. }) =
                call.wait
            {
                return false;
            }
            if !call.waits_on(now) {
                call.given_out = true;
                call.dues += 1;
                over.push(if call.confirmed {
                    (call.id, Expired::GraceConfirmed)
                } else {
                    (call.id, Expired::Grace)
                });
            }
            true
        });
        over
    }

    /// The first time at which something is to be done.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let calls = self.calls.iter().filter_map(Call::scheduled);
        let oldest = |owed: bool| self.kept.iter().find(|kept| kept.owed == owed);
        let kept = [oldest(false), oldest(true)].into_iter().flatten();
        calls.chain(kept.map(|kept| kept.remember.until)).min()
    }

    /// How many things are to be done at some time.
    pub(super) fn appointments(&self) -> usize {
        let calls = self.calls.iter().filter_map(Call::scheduled);
        calls.count() + self.kept.len()
    }

    pub(super) fn find(&self, scope: usize, request: &RequestId) -> Option<CallId> {
        let mut accepted = self.calls.iter().filter(|call| call.accepted);
        let found = accepted.find(|call| call.is(scope, request));
        found.map(|call| call.id)
    }

    pub(super) fn detachment(&self, id: CallId) -> Option<Detachment> {
        self.get(id)?.detachment
    }

    pub(super) fn detached(&self, scope: usize) -> Vec<CallId> {
        let its = self.calls.iter().filter(|call| call.scope == scope);
        let detached = its.filter(|call| call.wait.is_some());
        detached.map(|call| call.id).collect()
    }

    /// What an event id may name.
    pub(super) fn named(&self, scope: usize, stream: Stream) -> Vec<Named> {
        let mut allowed = self.holders(scope, stream);
        if !allowed.is_empty() && !self.contested.contains(&(scope, stream)) {
            assert_eq!(allowed.len(), 1, "the model lost track of who is contested");
            return allowed;
        }
        let its = || self.calls.iter().filter(|call| call.scope == scope);
        let in_flight = its().filter(|call| call.goes_by(stream));
        let mut in_flight: Vec<_> = in_flight.map(|call| call.id).collect();
        in_flight.sort_unstable();
        allowed.push(Named::OneOf(in_flight));
        let overflowed = its().filter(|call| call.names.len() > 2 * MAX_EVENT_IDS);
        let mut overflowed: Vec<_> = overflowed.map(|call| call.id).collect();
        overflowed.sort_unstable();
        allowed.push(if overflowed.is_empty() {
            Named::Nothing
        } else {
            Named::OneOf(overflowed)
        });
        allowed
    }

    fn holders(&self, scope: usize, stream: Stream) -> Vec<Named> {
        let calls = self.calls.iter().filter(|call| call.scope == scope);
        let calls = calls.filter(|call| call.goes_by(stream));
        let kept = self.kept.iter().filter(|kept| kept.scope == scope);
        let kept = kept.filter(|kept| kept.names.contains(&stream));
        calls
            .map(|call| Named::Call(call.id))
            .chain(kept.map(|kept| Named::Ended(kept.remember.end.clone())))
            .collect()
    }

    /// Nobody contests what nobody has.
    pub(super) fn settle_contests(&mut self) {
        let mut contested = std::mem::take(&mut self.contested);
        contested.retain(|(scope, stream)| !self.holders(*scope, *stream).is_empty());
        self.contested = contested;
    }

    pub(super) fn remembered(&self) -> impl Iterator<Item = CallId> {
        self.kept.iter().map(|kept| kept.id)
    }
}

// === impl Call ===

impl Call {
    fn is(&self, scope: usize, request: &RequestId) -> bool {
        self.scope == scope && self.request == *request
    }

    pub(super) fn is_attached(&self) -> bool {
        self.wait.is_none()
    }

    /// Whether a resume keeps it from being cancelled.
    pub(super) fn is_held_at(&self, now: Instant) -> bool {
        let held = self.holds > 0;
        match self.wait {
            Some(DetachedState::GraceUntil { deadline, .. }) => held && now < deadline + MAX_HOLD,
            _ => held,
        }
    }

    fn due(&self) -> Option<Instant> {
        match self.wait? {
            DetachedState::GraceUntil { deadline, .. } => {
                let held_to = (self.holds > 0).then_some(deadline + MAX_HOLD);
                let others = held_to.or(self.released).into_iter();
                let look = self.looks.last().copied();
                others.chain(look).chain([deadline]).max()
            }
            DetachedState::ForgetAt { until, .. } => Some(until).max(self.may_last_to),
            DetachedState::UntilComplete { .. } => self
                .unwatched
                .map(|at| at.max(self.may_last_to.unwrap_or(at))),
        }
    }

    fn scheduled(&self) -> Option<Instant> {
        let due = self.due().filter(|_| !self.given_out);
        due.into_iter().chain(self.may_last_to).min()
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|at| at <= now && !self.given_out)
    }

    /// Rule 7. Whether it waits on, because it was noticed late that its time was over.
    fn waits_on(&mut self, now: Instant) -> bool {
        let Some(due) = self.due() else {
            return false;
        };
        let Some(DetachedState::GraceUntil { deadline, retry }) = &mut self.wait else {
            return false;
        };
        if now > due + LATE && !self.put_off {
            self.put_off = true;
            self.confirmed = false;
            *deadline = now + (2 * *retry).max(MIN_PUT_OFF);
            self.last_deadline = Some(*deadline);
            return true;
        }
        let is_look = self.looks.contains(&due);
        let on_time = now <= due + A_LITTLE_LATE || is_look && now <= due + LOOK_AGAIN_LATE;
        if on_time || self.looks.len() == MAX_LOOKS {
            return false;
        }
        self.looks.push(now + LOOK_AGAIN);
        self.last_deadline = Some(now + LOOK_AGAIN);
        true
    }

    fn goes_by(&self, stream: Stream) -> bool {
        let known = |at: usize| at < MAX_EVENT_IDS || at + MAX_EVENT_IDS >= self.names.len();
        let mut names = self.names.iter().enumerate();
        names.any(|(at, name)| *name == stream && known(at))
    }

    fn known_names(&self) -> Vec<Stream> {
        let names = self.names.iter().copied();
        if self.names.len() > 2 * MAX_EVENT_IDS {
            let latest = &self.names[self.names.len() - MAX_EVENT_IDS..];
            names
                .take(MAX_EVENT_IDS)
                .chain(latest.iter().copied())
                .collect()
        } else {
            names.collect()
        }
    }
}
