//! Compares a session state with a very simple model under random operations.
//!
//! After each operation, the observable states of the two are compared. Independently of the model, [`Witness`] checks that the session
//! state never returns a call that has already ended.

use std::ops::Range;

use self::naive::{Answer, Completed, Model, Stream};
use super::*;
use crate::{
    call::{CancelReason, DetachCause, RequestId, Scope},
    limits::Limits,
};

#[cfg(fuzzing)]
mod decoded;
mod naive;
#[cfg(test)]
mod random;

#[cfg(fuzzing)]
pub(crate) use self::decoded::check_against_model;

/// Size of one unit of an answer. Next to it, the overhead of a retained call is negligible.
const UNIT: usize = 1 << 40;

/// A limit of retained units that is rarely reached.
const ROOMY: usize = 1 << 10;

/// A limit of retained units at which answers are evicted.
const TIGHT: usize = 2;

/// Lateness thresholds, in milliseconds. A deadline that runs later than one of them is handled differently.
const LATE_MS: [u64; 3] = [2, 20, 1_000];

/// The scopes that have issued the session id.
const SCOPES: Range<usize> = 0..2;
const REQUESTS: Range<usize> = 0..5;

/// Number of the first stream that belongs to just one call.
const OWN_STREAMS: u64 = 100;

/// Selects a call: either one in flight, if there are any, or any call so far.
#[derive(Debug, Clone, Copy)]
enum Pick {
    InFlight(usize),
    Any(usize),
}

#[derive(Debug, Clone, Copy)]
enum Generations {
    Newest,
    Any(usize),
}

#[derive(Debug, Clone, Copy)]
enum EventIds {
    /// A stream in rmcp's format that no other call has.
    Own,
    /// A stream that other calls may also have.
    Shared(Stream),
    /// Opaque ids: the first one, and their number.
    Many(u32, u32),
    /// Event ids from a server other than rmcp: their stream, the first index, and their number.
    Events(u64, u32, u32),
}

#[derive(Debug, Clone, Copy)]
enum Waiting {
    GraceUntil { after_ms: u64, retry_ms: u64 },
    UntilComplete,
    ForgetAt { after_ms: u64 },
}

/// The decision of a confirmation.
#[derive(Debug, Clone, Copy)]
enum Decision {
    Cancel,
    Postpone { wait_ms: u64 },
}

#[derive(Debug, Clone, Copy)]
struct Retaining {
    answered: bool,
    units: usize,
    for_s: u64,
}

/// How time passes.
#[derive(Debug, Clone, Copy)]
enum Advance {
    Ms(u64),
    /// To the next deadline, and then by another `and_ms`.
    Deadline {
        and_ms: u64,
    },
}

#[derive(Debug, Clone)]
enum Op {
    Start {
        key: (usize, usize),
        accepted: bool,
        deadline_ms: Option<u64>,
    },
    Accept(Pick),
    Rekey(Pick, (usize, usize)),
    RecordEventId(Pick, EventIds),
    Detach {
        call: Pick,
        generation: Generations,
        wait: Waiting,
        resumed_without_events: bool,
        /// Whether a call that must be cancelled now is finished at once.
        end: bool,
    },
    Attach(Pick),
    /// Resumes repeatedly, without any resume receiving an event.
    Poll {
        call: Pick,
        times: u32,
        every_ms: u64,
        /// The resume after which the runtime stalls, and for how long after the next deadline.
        stalled: Option<(u32, u64)>,
    },
    BeginResume(Pick),
    EndResume(Pick),
    RenewGrace(Pick),
    SetMaybeResumed(Pick),
    AddBackgroundReader(Pick),
    RemoveBackgroundReader(Pick),
    Finish(Pick, Option<Retaining>),
    /// Applies a cancellation that was decided on when the grace period expired.
    FinishDue(Pick, Retaining),
    /// Requests confirmation of a cancellation.
    RequestConfirmation(Pick),
    /// Answers a request for confirmation, possibly late, and possibly for a second time.
    Confirm(usize, Decision),
    /// Applies a cancellation of a detached call.
    FinishDetached(Pick, Retaining),
    /// Starts a call, detaches it if `is_detached` is set, and finishes it.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the fuzzer composes it from other operations")
    )]
    RunToEnd {
        is_detached: bool,
        completed: Retaining,
    },
    BeginClose {
        scope: usize,
        end: Option<Retaining>,
    },
    Advance(Advance),
    Expire {
        end: bool,
    },
    /// Expires calls `checks` times, each time late.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the fuzzer composes it from other operations")
    )]
    ExpireLate {
        checks: u32,
        and_ms: u64,
    },
}

/// A session state, its model, and the calls so far.
struct Run {
    shared: Arc<RegistryShared>,
    session: SessionState<u32, Answer>,
    model: Model,
    now: Instant,
    calls: Vec<CallId>,
    /// The generations of each call's streams, in the order of `calls`.
    generations: Vec<Vec<Generation>>,
    streams: Vec<Stream>,
    /// Requests for confirmation: the call, and its expiry in the session state and the model.
    confirmations: Vec<(CallId, ExpiryToken, usize)>,
    answers: u32,
    witness: Witness,
}

/// Records the calls that have ended. Panics if the session state returns one of them again.
#[derive(Default)]
struct Witness {
    ended: Vec<CallId>,
    untracked: Vec<CallId>,
    forgotten: Vec<CallId>,
}

// === impl Witness ===

impl Witness {
    fn record_end(&mut self, id: CallId) {
        self.assert_not_ended(id);
        self.ended.push(id);
    }

    /// Panics if a call has ended or has been untracked or forgotten.
    fn assert_not_ended(&self, id: CallId) {
        assert!(!self.ended.contains(&id), "{id:?} has ended before");
        assert!(
            !self.untracked.contains(&id),
            "{id:?} was untracked for a newer call"
        );
        assert!(!self.forgotten.contains(&id), "{id:?} was forgotten");
    }
}

// === impl Run ===

impl Run {
    fn new(capacity: usize) -> Self {
        let shared = Arc::new(RegistryShared::default());
        let limits = Limits::default().retained(usize::MAX);
        shared
            .totals
            .set_limits(limits.retained_per_session(capacity * UNIT + UNIT / 2));
        Self {
            session: SessionState::new(shared.clone(), Some(session_id(&shared))),
            shared,
            model: Model::new(capacity),
            now: Instant::now(),
            calls: Vec::new(),
            generations: Vec::new(),
            streams: vec![Stream::Numbered(99), Stream::Opaque(99)],
            confirmations: Vec::new(),
            answers: 0,
            witness: Witness::default(),
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Start {
                key,
                accepted,
                deadline_ms,
            } => self.start(key, accepted, deadline_ms),
            Op::Accept(call) => self.with_picked(call, Self::accept),
            Op::Rekey(call, key) => self.with_picked(call, |run, id| run.rekey(id, key)),
            Op::RecordEventId(call, event_ids) => {
                self.with_picked(call, |run, id| run.record_event_id(id, event_ids))
            }
            Op::Detach {
                call,
                generation,
                wait,
                resumed_without_events,
                end,
            } => self.with_picked(call, |run, id| {
                run.detach(id, generation, wait, resumed_without_events, end)
            }),
            Op::Attach(call) => self.with_picked(call, Self::attach),
            Op::Poll {
                call,
                times,
                every_ms,
                stalled,
            } => self.with_picked(call, |run, id| run.poll(id, times, every_ms, stalled)),
            Op::BeginResume(call) => self.with_picked(call, |run, id| {
                let accepted = run.session.begin_resume(id, run.now);
                assert_eq!(accepted, run.model.begin_resume(id, run.now));
            }),
            Op::EndResume(call) => self.with_picked(call, |run, id| {
                run.session.end_resume(id, run.now);
                run.model.end_resume(id, run.now);
            }),
            Op::RenewGrace(call) => self.with_picked(call, |run, id| {
                run.session.renew_grace(id, run.now);
                run.model.renew_grace(id, run.now);
            }),
            Op::SetMaybeResumed(call) => self.with_picked(call, |run, id| {
                run.session.mark_maybe_resumed(id, unobserved(run.now));
                run.model.mark_maybe_resumed(id, run.now);
            }),
            Op::AddBackgroundReader(call) => self.with_picked(call, |run, id| {
                run.session.add_background_reader(id);
                run.model.add_background_reader(id);
            }),
            Op::RemoveBackgroundReader(call) => self.with_picked(call, |run, id| {
                let unobserved_until = run.now + UNOBSERVED_TTL;
                run.session
                    .remove_background_reader(id, Some(unobserved_until));
                run.model.remove_background_reader(id, run.now);
            }),
            Op::Finish(call, completed) => {
                self.with_picked(call, |run, id| run.finish(id, completed))
            }
            Op::FinishDue(call, completed) => self.with_picked(call, |run, id| {
                let is_due = run.model.is_due(id);
                run.finish_if(id, is_due, completed, |session, ended| {
                    session.finish_due(id, ended)
                });
            }),
            Op::RequestConfirmation(call) => self.with_picked(call, |run, id| {
                let (expiry, expected) = (run.session.expiry(id), run.model.expiry(id));
                assert_eq!(expiry.is_some(), expected.is_some());
                let confirmation = expiry.zip(expected);
                run.confirmations
                    .extend(confirmation.map(|(expiry, expected)| (id, expiry, expected)));
            }),
            Op::Confirm(index, decision) => self.confirm(index, decision),
            Op::FinishDetached(call, completed) => self.with_picked(call, |run, id| {
                let may_cancel = run.model.may_cancel(id);
                run.finish_if(id, may_cancel, completed, |session, ended| {
                    session.finish_detached(id, ended)
                });
            }),
            Op::RunToEnd {
                is_detached,
                completed,
            } => self.run_to_end(is_detached, completed),
            Op::BeginClose { scope, end } => self.begin_close(scope, end),
            Op::Advance(advance) => self.advance(advance),
            Op::Expire { end } => self.expire(end),
            Op::ExpireLate { checks, and_ms } => {
                for _ in 0..checks {
                    self.advance(Advance::Deadline { and_ms });
                    self.expire(true);
                }
            }
        }
        self.compare();
    }

    /// Runs an operation on the picked call, if there is one.
    fn with_picked(&mut self, call: Pick, operation: impl FnOnce(&mut Self, CallId)) {
        let in_flight = self.model.calls();
        let id = match call {
            Pick::InFlight(n) if !in_flight.is_empty() => in_flight[n % in_flight.len()].id,
            Pick::InFlight(n) | Pick::Any(n) if !self.calls.is_empty() => {
                self.calls[n % self.calls.len()]
            }
            _ => return,
        };
        operation(self, id);
    }

    fn start(
        &mut self,
        (scope, request): (usize, usize),
        accepted: bool,
        deadline_ms: Option<u64>,
    ) {
        let id = CallId::next();
        let deadline = deadline_ms.map(|ms| self.now + Duration::from_millis(ms));
        let payload = u32::try_from(self.calls.len()).unwrap();
        self.calls.push(id);
        self.generations.push(vec![POST_GENERATION]);
        let request = request_of(request);
        let key = (scope_of(scope), request.clone());
        self.session.start(id, Some(key), payload, deadline);
        self.model.start(id, (scope, request), deadline);
        if accepted {
            self.accept(id);
        }
    }

    fn accept(&mut self, id: CallId) {
        let detachments = self.detachments();
        let untracked = self.session.accept(id);
        let expected = self.model.accept(id);
        self.check_untracked(untracked, expected, &detachments);
    }

    fn rekey(&mut self, id: CallId, (scope, request): (usize, usize)) {
        let detachments = self.detachments();
        let request = request_of(request);
        let untracked = self.session.rekey(id, &scope_of(scope), request.clone());
        let expected = self.model.rekey(id, (scope, request));
        self.check_untracked(untracked, expected, &detachments);
    }

    /// Returns the detachment of each call, in the order of `calls`.
    fn detachments(&self) -> Vec<Option<Detachment>> {
        let calls = self.calls.iter();
        calls.map(|id| self.model.detachment(*id)).collect()
    }

    /// Checks that the untracked call is the expected one, or that there is none.
    fn check_untracked(
        &mut self,
        untracked: Option<UntrackedCall<u32>>,
        expected: Option<CallId>,
        detachments: &[Option<Detachment>],
    ) {
        assert_eq!(untracked.map(|(id, ..)| id), expected);
        if let Some((id, payload, finished)) = untracked {
            self.witness.assert_not_ended(id);
            assert_eq!(self.ordinal(id), payload as usize);
            assert_eq!(finished.detachment, detachments[payload as usize]);
            assert!(!finished.may_cancel_server);
            self.witness.untracked.push(id);
        }
    }

    fn record_event_id(&mut self, id: CallId, event_ids: EventIds) {
        let streams: Vec<Stream> = match event_ids {
            EventIds::Own => vec![Stream::Numbered(OWN_STREAMS + self.ordinal(id) as u64)],
            EventIds::Shared(stream) => vec![stream],
            EventIds::Many(first, count) => (first..first + count).map(Stream::Opaque).collect(),
            EventIds::Events(stream, first, count) => {
                let events = first..first + count;
                events.map(|index| Stream::Event(stream, index)).collect()
            }
        };
        for stream in &streams {
            // In rmcp's format, any of a stream's event ids identifies it.
            let event = event_id(*stream, self.answers);
            let form = match stream {
                Stream::Event(..) => EventIdFormat::Other,
                Stream::Numbered(_) | Stream::Opaque(_) => EventIdFormat::Rmcp,
            };
            self.session.record_event_id(id, &event, form);
            self.model.record_event_id(id, *stream);
        }
        // If there are many ids, only the first and last ones and those around multiples of 256 are compared.
        let sample = |at: &usize| {
            let mark = at % 256;
            streams.len() < 10 || !(2..254).contains(&mark) || at + 2 >= streams.len()
        };
        let sample = (0..streams.len()).filter(sample).map(|at| streams[at]);
        self.streams.extend(sample);
        self.streams.sort_unstable();
        self.streams.dedup();
    }

    fn detach(
        &mut self,
        id: CallId,
        generation: Generations,
        wait: Waiting,
        resumed_without_events: bool,
        end: bool,
    ) {
        let (generation, resumes) = self.generation(id, generation);
        let wait = wait.to_state(self.now);
        let detachment = Detachment::new(DetachCause::Disconnected, self.now);
        let detached =
            self.session
                .detach(id, generation, wait, resumed_without_events, detachment);
        let expected = self
            .model
            .detach(id, resumes, wait, resumed_without_events, detachment);
        assert_eq!(detached, expected);
        if detached == DetachOutcome::CancelNow && end {
            self.finish(id, None);
        }
    }

    fn attach(&mut self, id: CallId) {
        let generation = self.session.attach(id);
        assert_eq!(generation.is_some(), self.model.attach(id));
        if let Some(generation) = generation {
            let ordinal = self.ordinal(id);
            let generations = &mut self.generations[ordinal];
            assert!(generations.iter().all(|older| *older < generation));
            generations.push(generation);
        }
    }

    fn poll(&mut self, id: CallId, times: u32, every_ms: u64, stalled: Option<(u32, u64)>) {
        let wait = Waiting::GraceUntil {
            after_ms: 3 * every_ms,
            retry_ms: every_ms,
        };
        for time in 0..times {
            self.attach(id);
            self.now += Duration::from_millis(every_ms);
            self.detach(id, Generations::Newest, wait, true, true);
            if let Some((_, and_ms)) = stalled.filter(|(at, _)| *at == time) {
                self.advance(Advance::Deadline { and_ms });
            }
            self.expire(true);
        }
    }

    fn finish(&mut self, id: CallId, completed: Option<Retaining>) {
        self.finish_by(id, completed, |session, ended| session.finish(id, ended));
    }

    fn finish_if(
        &mut self,
        id: CallId,
        takes_effect: bool,
        completed: Retaining,
        finish: impl FnOnce(&mut SessionState<u32, Answer>, Completion<Answer>) -> Option<Finished>,
    ) {
        if takes_effect {
            let finish = |session: &mut SessionState<_, _>, ended: Option<_>| {
                finish(session, ended.unwrap())
            };
            self.finish_by(id, Some(completed), finish);
        } else {
            let ended = ended(&completed.to_completed(0, self.now));
            assert_eq!(finish(&mut self.session, ended), None);
        }
    }

    fn finish_by(
        &mut self,
        id: CallId,
        completed: Option<Retaining>,
        finish: impl FnOnce(
            &mut SessionState<u32, Answer>,
            Option<Completion<Answer>>,
        ) -> Option<Finished>,
    ) {
        self.answers += 1;
        let completed = completed.map(|completed| completed.to_completed(self.answers, self.now));
        let detachment = self.model.detachment(id);
        let finished = finish(&mut self.session, completed.as_ref().map(ended));
        let may_cancel_server = self.model.finish(id, completed);
        let expected_evicted = self.model.take_evicted();
        let expected = may_cancel_server.map(|may_cancel_server| Finished {
            may_cancel_server,
            detachment,
            has_evicted: !expected_evicted.is_empty(),
        });
        assert_eq!(finished, expected);
        let evicted = self.session.take_evicted().into_iter();
        assert_eq!(
            evicted.map(|evicted| evicted.call).collect::<Vec<_>>(),
            expected_evicted
        );
        if finished.is_some() {
            self.witness.record_end(id);
        }
    }

    fn confirm(&mut self, index: usize, decision: Decision) {
        let Some(at) = index.checked_rem(self.confirmations.len()) else {
            return;
        };
        let (id, expiry, expected_expiry) = self.confirmations[at];
        let is_applied = match decision {
            Decision::Cancel => self.session.confirm(id, expiry, self.now),
            Decision::Postpone { wait_ms } => {
                let until = self.now + Duration::from_millis(wait_ms);
                self.session.postpone(id, expiry, until)
            }
        };
        assert_eq!(
            is_applied,
            self.model.confirm(id, expected_expiry, decision, self.now)
        );
    }

    fn run_to_end(&mut self, is_detached: bool, completed: Retaining) {
        self.start((SCOPES.start, REQUESTS.start), true, None);
        let Some(id) = self.calls.last().copied() else {
            return;
        };
        self.record_event_id(id, EventIds::Own);
        if is_detached {
            self.detach(
                id,
                Generations::Newest,
                Waiting::UntilComplete,
                false,
                false,
            );
        }
        self.finish(id, Some(completed));
    }

    fn advance(&mut self, advance: Advance) {
        let (from, ms) = match advance {
            Advance::Ms(ms) => (self.now, ms),
            Advance::Deadline { and_ms } => {
                let next = self.session.next_deadline().unwrap_or(self.now);
                (self.now.max(next), and_ms)
            }
        };
        self.now = from + Duration::from_millis(ms);
    }

    fn begin_close(&mut self, scope: usize, end: Option<Retaining>) {
        let taken = self.session.begin_close(&scope_of(scope)).into_iter();
        let taken = sorted(taken.map(|(id, _)| id).collect());
        taken
            .iter()
            .for_each(|id| self.witness.assert_not_ended(*id));
        assert_eq!(taken, sorted(self.model.begin_close(scope)));
        if end.is_some() {
            for id in taken {
                self.finish(id, end);
            }
            let none = self.session.begin_close(&scope_of(scope));
            assert!(none.is_empty(), "{none:?}");
        }
    }

    fn expire(&mut self, end: bool) {
        let before: Vec<CallId> = self.model.calls().iter().map(|call| call.id).collect();
        let detachments = self.detachments();
        let expired_calls = self.session.expire(self.now);
        for (id, payload, expired) in &expired_calls {
            self.witness.assert_not_ended(*id);
            assert_eq!(self.ordinal(*id), *payload as usize);
            let call = self.model.get(*id).unwrap();
            match expired {
                Expired::Grace | Expired::GraceConfirmed => {
                    assert!(!call.is_attached(), "an orphan is not attached");
                    assert!(
                        !call.has_pending_resume_at(self.now),
                        "an orphan has no pending resume"
                    );
                }
                Expired::Deadline => {
                    assert!(call.deadline.is_some_and(|at| at <= self.now), "too soon");
                }
                Expired::Forgotten(finished) => {
                    assert!(!call.is_attached(), "an unobserved call is not attached");
                    assert_eq!(finished.detachment, detachments[*payload as usize]);
                }
            }
        }
        let expired_calls = expired_calls
            .into_iter()
            .map(|(id, _, expired)| (id, expired));
        let (forgotten, mut expired_calls): (Vec<_>, Vec<_>) =
            expired_calls.partition(|(_, expired)| matches!(expired, Expired::Forgotten(_)));
        expired_calls.sort_by_key(|(id, _)| *id);
        let mut expected = self.model.expire(self.now);
        expected.sort_by_key(|(id, _)| *id);
        assert_eq!(expired_calls, expected);
        let removed = before.into_iter();
        let removed: Vec<_> = removed.filter(|id| self.model.get(*id).is_none()).collect();
        let forgotten = forgotten.into_iter().map(|(id, _)| id).collect();
        assert_eq!(sorted(forgotten), sorted(removed.clone()));
        self.witness.forgotten.extend(removed);
        for (id, expired) in expired_calls {
            // A call that has reached its deadline is always cancelled.
            if expired == Expired::Deadline {
                self.finish(id, None);
            } else if end {
                assert!(self.model.is_due(id));
                self.finish(id, None);
            }
        }
        let next = self.session.next_deadline();
        assert!(
            next.is_none_or(|next| next > self.now),
            "the timer would run again at once"
        );
    }

    /// Compares all observable state.
    fn compare(&self) {
        let Self { session, model, .. } = self;
        assert_eq!(session.len(), model.calls().len());
        assert_eq!(session.next_deadline(), model.next_deadline());
        assert_eq!(
            session.due.len() + session.retained.len(),
            model.deadline_count()
        );
        let detached = model
            .calls()
            .iter()
            .filter(|call| model.detachment(call.id).is_some())
            .count();
        assert_eq!(session.detached, detached);
        assert_eq!(self.shared.totals.detached(), detached);
        assert_eq!(self.shared.totals.in_flight(), session.len());
        for (payload, id) in self.calls.iter().enumerate() {
            let expected = model.get(*id).map(|_| payload as u32);
            assert_eq!(session.call(*id).copied(), expected);
            assert_eq!(session.detachment(*id), model.detachment(*id));
            assert_eq!(
                session.may_have_been_resumed(*id),
                model.may_have_been_resumed(*id)
            );
        }
        for scope in SCOPES {
            let at = scope_of(scope);
            for request in REQUESTS {
                let request = request_of(request);
                let found = session.find(&at, &request).map(|(id, _)| id);
                assert_eq!(found, model.find(scope, &request));
            }
            let detached = session.detached(&at).into_iter();
            let detached = sorted(detached.map(|(id, _)| id).collect());
            assert_eq!(detached, sorted(model.detached(scope)));
            for stream in &self.streams {
                self.compare_match(scope, *stream);
            }
        }
    }

    fn compare_match(&self, scope: usize, stream: Stream) {
        let found = match self
            .session
            .match_event(&scope_of(scope), &event_id(stream, 7))
        {
            EventMatch::Call(id, _) => naive::Match::Call(id),
            EventMatch::Ambiguous(calls) => {
                naive::Match::Ambiguous(sorted(calls.into_iter().map(|(id, _)| id).collect()))
            }
            EventMatch::Ended(end) => naive::Match::Ended(end),
            EventMatch::Nothing => naive::Match::Nothing,
        };
        found
            .in_flight()
            .iter()
            .for_each(|id| self.witness.assert_not_ended(*id));
        let expected = self.model.match_event(scope, stream);
        // The state seldom takes another id for one that a call no longer stores.
        if let naive::Match::Ambiguous(ids) = &found
            && matches!(expected, naive::Match::Nothing | naive::Match::Ambiguous(_))
            && ids.iter().all(|id| self.model.has_forgotten_ids(*id))
        {
            let is_found = |id: &CallId| ids.contains(id);
            assert!(expected.in_flight().iter().all(is_found), "{stream:?}");
            return;
        }
        assert_eq!(found, expected, "{stream:?}");
    }

    /// Finishes all calls, lets all retained calls expire, and checks that nothing remains.
    fn end(mut self) {
        for id in self.calls.clone() {
            self.finish(id, None);
        }
        self.compare();
        assert_eq!(
            self.session.retained.len(),
            self.model.retained_calls().count()
        );
        // At first, retained calls are found expired so late that they are postponed.
        for _ in 0..2 {
            self.now += UNOBSERVED_TTL;
            self.expire(false);
            self.compare();
        }
        assert_empty(&self.session);
    }

    fn ordinal(&self, id: CallId) -> usize {
        self.calls.iter().position(|other| *other == id).unwrap()
    }

    /// Returns the generation of one of a call's streams, and the number of resumes up to it.
    fn generation(&self, id: CallId, generation: Generations) -> (Generation, usize) {
        let generations = &self.generations[self.ordinal(id)];
        let resumes = match generation {
            Generations::Newest => generations.len() - 1,
            Generations::Any(n) => n % generations.len(),
        };
        (generations[resumes], resumes)
    }
}

// === impl Waiting ===

impl Waiting {
    fn to_state(self, now: Instant) -> DetachedState {
        match self {
            Self::GraceUntil { after_ms, retry_ms } => DetachedState::GraceUntil {
                deadline: now + Duration::from_millis(after_ms),
                retry: Duration::from_millis(retry_ms),
            },
            Self::UntilComplete => DetachedState::UntilComplete {
                resume_window: Duration::ZERO,
            },
            Self::ForgetAt { after_ms } => DetachedState::ForgetAt {
                until: now + Duration::from_millis(after_ms),
                resume_window: Duration::ZERO,
            },
        }
    }
}

// === impl Retaining ===

impl Retaining {
    fn to_completed(self, answer: u32, now: Instant) -> Completed {
        Completed {
            end: if self.answered {
                RetainedOutcome::Answered(answer)
            } else {
                RetainedOutcome::Cancelled(RequestId::Number(answer.into()), CancelReason::Orphaned)
            },
            units: if self.answered { self.units } else { 0 },
            at: now,
            until: now + Duration::from_secs(self.for_s),
        }
    }
}

/// Returns the state of a call that keeps running unobserved from now on.
pub(super) fn unobserved(now: Instant) -> DetachedState {
    DetachedState::ForgetAt {
        until: now + UNOBSERVED_TTL,
        resume_window: Duration::ZERO,
    }
}

fn ended(completed: &Completed) -> Completion<Answer> {
    Completion {
        outcome: completed.end.clone(),
        weight: completed.units * UNIT,
        at: completed.at,
        until: completed.until,
    }
}

/// Returns the session id and its hash.
pub(super) fn session_id(shared: &RegistryShared) -> (Arc<str>, KeyHash) {
    ("s".into(), shared.hasher.session_id("s"))
}

pub(super) fn scope_of(scope: usize) -> Scope {
    Scope::Path(["/mcp", "/other"][scope].into())
}

fn request_of(request: usize) -> RequestId {
    match request {
        0 => RequestId::Number(1),
        1 => RequestId::String("1".into()),
        other => RequestId::Number(other as i64),
    }
}

/// Returns the id of one of a stream's events.
fn event_id(stream: Stream, index: u32) -> Vec<u8> {
    match stream {
        Stream::Numbered(number) => format!("{index}/{number}"),
        Stream::Opaque(number @ 0..2) => number.to_string(),
        Stream::Opaque(number) => format!("event/{number}"),
        Stream::Event(stream, index) => format!("{index}/{}", 1_000 + stream),
    }
    .into_bytes()
}

fn sorted(mut ids: Vec<CallId>) -> Vec<CallId> {
    ids.sort_unstable();
    ids
}

fn agrees_with_model(capacity: usize, ops: &[Op]) {
    let mut run = Run::new(capacity);
    for op in ops {
        run.run(op);
    }
    run.end();
}

pub(super) fn assert_empty<T: std::fmt::Debug + Clone, A: Clone>(session: &SessionState<T, A>) {
    assert!(session.is_empty());
    assert!(session.by_request.is_empty(), "{:?}", session.by_request);
    assert!(session.due.is_empty(), "{:?}", session.due);
    assert_eq!(session.detached, 0);
    let totals = &session.shared.totals;
    assert_eq!(
        (totals.in_flight(), totals.detached(), totals.bytes()),
        (0, 0, 0)
    );
}
