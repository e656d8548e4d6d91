//! Records what is observed of all exchanges, and checks the invariants that always hold.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use bytes::Bytes;
use fuzz::{
    json::Json,
    judge::{Verdict, answer, is_array},
    parsers::by_sseer,
};
use mcp_cancel_on_disconnect::{
    CallId, CallInfo, CallToken, CancelReason, Event, Outcome, RequestId, observe::DetachCause,
};
use serde_json::Value;

use crate::script::Head;

/// Clones share one record.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Records>>);

/// Where bytes were recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// From the client into the layer.
    RequestIn,
    /// From the layer to the inner service.
    RequestOut,
    /// From the inner service into the layer.
    ResponseIn,
    /// From the layer to the client.
    ResponseOut,
}

#[derive(Default)]
struct Records {
    slots: Vec<Seen>,
    calls: BTreeMap<CallId, Call>,
    injected: Vec<(String, String, Value)>,
    /// The exchange that is being polled or dropped at the moment.
    current: Option<usize>,
}

/// The path and the ids in a request.
#[derive(Default)]
pub struct Names {
    pub path: String,
    /// `None` if the request has no session.
    pub session: Option<String>,
    pub last_event_id: Option<String>,
}

/// Which part of an exchange the client is holding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holds {
    #[default]
    Nothing,
    Future,
    Body,
}

/// Everything observed of one exchange.
#[derive(Default)]
struct Seen {
    names: Names,
    is_post: bool,
    holds: Holds,
    /// Whether the inner service's body has more data.
    has_more: bool,
    /// The call that this resume belongs to, if it can only be that one.
    resumes: Option<CallId>,
    token: Option<CallToken>,
    child: Option<Child>,
    /// Whether the token had already fired when the inner service first reported an answer.
    fired_before_answer: Option<bool>,
    head: Option<Head>,
    passed: BTreeMap<Side, Vec<Bytes>>,
}

struct Child {
    fired: Box<dyn Fn() -> bool + Send>,
    cleaned: Arc<Mutex<u32>>,
}

struct Call {
    slot: usize,
    session: Option<String>,
    request: RequestId,
    is_detached: bool,
    /// Whether the inner response was lost inside the layer. The client may then still have to read the layer's error on the
    /// first stream.
    is_lost_inside: bool,
    ended: Option<Outcome>,
}

/// The id of a call that has been cancelled.
type Cancelled = Value;

/// Frames that the layer may add to a response.
#[derive(Clone, Copy)]
pub struct AddedFrames {
    pub probes: bool,
    pub heads: bool,
}

/// Prints a step if `TRACE` is set. `TRACE=1` helps to understand an input.
pub fn trace(what: impl FnOnce() -> String) {
    static IS_TRACED: OnceLock<bool> = OnceLock::new();
    if *IS_TRACED.get_or_init(|| std::env::var_os("TRACE").is_some()) {
        eprintln!("{}", what());
    }
}

// === impl Ledger ===

impl Ledger {
    /// Adds an exchange and returns its number.
    pub fn add_slot(&self, names: Names, is_post: bool) -> usize {
        let mut records = self.records();
        records.slots.push(Seen {
            names,
            is_post,
            ..Seen::default()
        });
        records.slots.len() - 1
    }

    /// Sets which part the client holds from now on.
    pub fn set_holds(&self, slot: usize, holds: Holds) {
        let mut records = self.records();
        records.slots[slot].holds = holds;
        if holds == Holds::Body {
            records.slots[slot].resumes = records.call_of_resume(slot);
        }
    }

    /// Sets whether the inner service's body has more data.
    pub fn set_has_more(&self, slot: usize, has_more: bool) {
        self.records().slots[slot].has_more = has_more;
    }

    /// Sets the exchange that is polled or dropped from now on.
    pub fn set_current(&self, slot: Option<usize>) {
        self.records().current = slot;
    }

    pub fn set_token(&self, slot: usize, token: CallToken) {
        self.records().slots[slot].token = Some(token);
    }

    /// Records the head that the inner service has sent.
    pub fn record_head(&self, slot: usize, head: Head) {
        trace(|| {
            format!(
                "{slot} answers {} {:?} {}",
                head.status, head.media_type, head.encoded
            )
        });
        self.records().slots[slot].head = Some(head);
    }

    /// Records a frame, and where it was seen.
    pub fn record_frame(&self, slot: usize, side: Side, data: Bytes) {
        trace(|| format!("{slot} {side:?} {}", data.escape_ascii()));
        self.records().slots[slot]
            .passed
            .entry(side)
            .or_default()
            .push(data);
    }

    /// Records a cancellation that the inner service has received.
    pub fn record_cancel(&self, path: String, session: String, id: Value) {
        trace(|| format!("cancel of {id} in {session} at {path}"));
        self.records().injected.push((path, session, id));
    }

    /// Requests a child token, as a handler would, and registers a clean-up.
    pub fn use_token(&self, slot: usize) {
        let token = match &self.records().slots[slot] {
            Seen {
                token: Some(token),
                child: None,
                ..
            } => token.clone(),
            _ => return,
        };
        let cleaned = Arc::new(Mutex::new(0));
        let cleans = cleaned.clone();
        token.on_cancel(move |_| async move { *cleans.lock().expect("no panic") += 1 });
        let child = token.child_token();
        let fired = Box::new(move || child.is_cancelled());
        self.records().slots[slot].child = Some(Child { fired, cleaned });
    }

    /// Reports that the inner service has the answer to a request.
    pub fn report_answer(&self, slot: usize) {
        let Some(token) = self.records().slots[slot].token.clone() else {
            return;
        };
        trace(|| format!("{slot} is answered inside"));
        let fired = token.is_cancelled();
        token.answered();
        let mut records = self.records();
        records.slots[slot].fired_before_answer.get_or_insert(fired);
    }

    /// Drops all tokens.
    pub fn drop_tokens(&self) {
        let tokens: Vec<_> = self
            .records()
            .slots
            .iter_mut()
            .map(|slot| (slot.token.take(), slot.child.take()))
            .collect();
        drop(tokens);
    }

    /// With `stalls`, a client may be reported as disconnected even though it holds a stream.
    pub fn on_event(&self, event: &Event<'_>, stalls: bool) {
        trace(|| format!("{event:?}"));
        let mut records = self.records();
        match event {
            Event::Started { call, .. } => records.start(call),
            Event::Detached { call, cause, .. } => {
                assert!(stalls || records.has_no_stream(call), "detached too early");
                let call = records.in_flight(call, "detached");
                call.is_lost_inside |= *cause == DetachCause::ResponseDropped;
                assert!(!call.is_detached, "detached twice");
                call.is_detached = true;
            }
            Event::Resumed {
                call, detachment, ..
            } => {
                let call = records.in_flight(call, "resumed");
                assert_eq!(detachment.is_some(), call.is_detached, "resumed");
                call.is_detached = false;
            }
            Event::Ended {
                call,
                outcome,
                detachment,
                ..
            } => {
                let has_disconnected = match outcome {
                    Outcome::Cancelled(reason) => is_disconnect(*reason),
                    _ => false,
                };
                assert!(
                    stalls || !has_disconnected || records.has_no_stream(call),
                    "cancelled though its client holds a stream of it"
                );
                let call = records.in_flight(call, "ended");
                assert_eq!(detachment.is_some(), call.is_detached, "ended");
                call.ended = Some(*outcome);
            }
            Event::CancelFailed { call, .. } => {
                let call = records.calls.get(&call.id()).expect("it has started");
                assert!(matches!(call.ended, Some(Outcome::Cancelled(_))));
            }
            Event::UnparsedBody { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// Checks the invariants that must hold between any two operations.
    pub fn check(&self, added: AddedFrames) {
        let records = self.records();
        let cancelled = records.calls.values().filter(|call| call.is_cancelled());
        let cancelled: Vec<Cancelled> = cancelled.map(|call| Value::from(&call.request)).collect();
        for (number, slot) in records.slots.iter().enumerate() {
            let mut calls = records.calls.values().filter(|call| call.slot == number);
            let call = calls.next();
            assert!(calls.next().is_none(), "a request carries one call");
            assert!(
                call.is_none() || !slot.sent_an_array(),
                "an array carries no call"
            );
            slot.check_token(call);
            slot.check_bytes(call.is_some_and(Call::is_cancelled), &cancelled, added);
            let Some((head, call)) = slot.head.as_ref().zip(call) else {
                continue;
            };
            assert!(
                // An answer that is not a stream ends its call along with its body, unless the client has already
                // disconnected.
                head.is_stream()
                    || slot.holds == Holds::Body
                    || call.is_detached
                    || call.ended.is_some(),
                "an answer that was sent ends its call"
            );
            if slot.is_post && head.is_readable_stream() && !added.heads {
                let is_answered = slot.answered().contains(&call.request);
                assert!(
                    !is_answered || call.ended.is_some(),
                    "{:?} was answered",
                    call.request
                );
            }
        }
        records.check_injections();
    }

    /// Checks that all started calls have ended.
    pub fn check_ended(&self) {
        let records = self.records();
        let open = records
            .calls
            .values()
            .filter(|call| call.ended.is_none())
            .count();
        assert_eq!(open, 0, "calls that never ended");
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Records ===

impl Records {
    fn start(&mut self, call: &CallInfo) {
        let slot = self.current.expect("calls start in polls and drops");
        let record = Call {
            slot,
            session: call.session().map(str::to_owned),
            request: call.request_id().clone(),
            is_detached: false,
            is_lost_inside: false,
            ended: None,
        };
        assert!(
            self.calls.insert(call.id(), record).is_none(),
            "started twice"
        );
    }

    fn in_flight(&mut self, call: &CallInfo, what: &str) -> &mut Call {
        let record = self.calls.get_mut(&call.id()).expect("it has started");
        assert!(record.ended.is_none(), "{what} after it ended");
        record
    }

    /// Returns `true` if the client holds no stream of the call. The stream that is being polled or dropped does not count.
    fn has_no_stream(&self, call: &CallInfo) -> bool {
        let record = self.calls.get(&call.id()).expect("it has started");
        let mut slots = self.slots.iter().enumerate();
        !slots.any(|(number, slot)| {
            let is_first = number == record.slot && !record.is_lost_inside;
            let is_of_call = is_first || slot.resumes == Some(call.id());
            is_of_call && self.current != Some(number) && slot.is_open()
        })
    }

    /// Returns the call that an accepted resume belongs to.
    ///
    /// Returns `None` if its event id may be from another stream.
    fn call_of_resume(&self, number: usize) -> Option<CallId> {
        let slot = &self.slots[number];
        let event_id = slot.names.last_event_id.as_deref()?;
        let session = slot.names.session.as_deref()?;
        let stream = stream_of(event_id);
        let with_session = self.slots.iter().enumerate().filter(|(_, other)| {
            other.names.path == slot.names.path && other.names.session.as_deref() == Some(session)
        });
        let mut sent_event_of = with_session.filter(|(_, other)| other.sent_event_of(stream));
        let is_resume = |other: &Seen| {
            let resumed = other.names.last_event_id.as_deref();
            !other.is_post && resumed.map(stream_of) == Some(stream)
        };
        let (post, posted) = sent_event_of.clone().find(|(_, other)| other.is_post)?;
        // A foreign server's event ids identify nothing but the stream they were seen on.
        posted.event_ids().iter().find(|id| *id == event_id)?;
        if !sent_event_of.all(|(number, other)| number == post || is_resume(other)) {
            return None;
        }
        let mut calls = self.calls.iter().filter(|(_, call)| call.slot == post);
        let (id, call) = calls.next().filter(|_| calls.next().is_none())?;
        let is_in_flight = call.ended.is_none() && call.session.as_deref() == Some(session);
        is_in_flight.then_some(*id)
    }

    /// Checks that cancels are only injected for calls that were cancelled by this layer.
    ///
    /// Each is injected once, under its call's id.
    fn check_injections(&self) {
        for injected in &self.injected {
            let (path, session, id) = injected;
            let count = self
                .injected
                .iter()
                .filter(|other| *other == injected)
                .count();
            let cancelled = self.calls.values().filter(|call| {
                matches!(call.ended, Some(Outcome::Cancelled(_)))
                    && call.session.as_ref() == Some(session)
                    && Value::from(&call.request) == *id
                    && self.slots[call.slot].names.path == *path
            });
            assert!(
                count <= cancelled.count(),
                "{injected:?} for a call that was not cancelled"
            );
        }
    }
}

/// Returns `true` if this reason means that the client had disconnected.
fn is_disconnect(reason: CancelReason) -> bool {
    matches!(
        reason,
        CancelReason::ClientDisconnected | CancelReason::Orphaned | CancelReason::ResponseDropped
    )
}

/// Returns the part of an event id that identifies its stream.
fn stream_of(event_id: &str) -> &str {
    event_id
        .split_once('/')
        .map_or(event_id, |(_, stream)| stream)
}

// === impl Seen ===

impl Seen {
    /// Returns `true` if the client is waiting for more than the end of the stream.
    fn is_open(&self) -> bool {
        match (self.holds, &self.head) {
            (Holds::Nothing, _) => false,
            (Holds::Future, _) | (Holds::Body, None) => self.is_post,
            (Holds::Body, Some(head)) => head.is_stream() && self.has_more,
        }
    }

    /// Returns `true` if the client has been sent an event of this stream.
    fn sent_event_of(&self, stream: &str) -> bool {
        self.event_ids().iter().any(|id| stream_of(id) == stream)
    }

    /// Returns the ids of the events that the client has been sent.
    fn event_ids(&self) -> Vec<String> {
        if !self.head.as_ref().is_some_and(Head::is_readable_stream) {
            return Vec::new();
        }
        let passed = self.passed.get(&Side::ResponseOut);
        let frames = passed.map(Vec::as_slice).unwrap_or_default().concat();
        let text = String::from_utf8_lossy(&frames).replace("\r\n", "\n");
        // What is left over is an incomplete event.
        let (whole, _) = text.rsplit_once("\n\n").unwrap_or_default();
        let ids = whole.lines().filter_map(|line| line.strip_prefix("id: "));
        ids.map(str::to_owned).collect()
    }

    /// Returns `true` if the request body starts like an array.
    fn sent_an_array(&self) -> bool {
        let sent = self.passed.get(&Side::RequestIn);
        sent.is_some_and(|frames| is_array(&frames.concat()))
    }

    fn check_token(&self, call: Option<&Call>) {
        let reason = self.token.as_ref().and_then(CallToken::reason);
        if let Some(child) = &self.child {
            assert_eq!(
                (child.fired)(),
                reason.is_some(),
                "a token fires with its reason"
            );
            assert_eq!(
                *child.cleaned.lock().expect("no panic"),
                u32::from(reason.is_some())
            );
        }
        if let Some(fired) = self.fired_before_answer.filter(|_| self.token.is_some()) {
            assert_eq!(reason.is_some(), fired, "an answer is the end");
            assert!(call.is_none_or(|call| call.ended.is_some()), "answered");
        }
        if let Some(call) = call.filter(|_| self.token.is_some()) {
            assert_eq!(
                reason,
                call.cancelled(),
                "a token has the reason of its cancel"
            );
        }
    }

    fn check_bytes(&self, is_cancelled: bool, cancelled: &[Cancelled], added: AddedFrames) {
        let side = |side| {
            self.passed
                .get(&side)
                .map(Vec::as_slice)
                .unwrap_or_default()
        };
        // Both sides are equal even if the inner service gives up before the body has ended.
        assert_eq!(
            side(Side::RequestIn),
            side(Side::RequestOut),
            "the request body"
        );
        let (inner, outer) = (side(Side::ResponseIn), side(Side::ResponseOut));
        if added.heads || is_cancelled {
            return;
        }
        let is_added = |frame: &&Bytes| added.probes && &***frame == b":\n\n";
        let passed: Vec<&Bytes> = outer.iter().filter(|frame| !is_added(frame)).collect();
        let before: Vec<&Bytes> = inner.iter().collect();
        if !self.is_post {
            // The resumed call was cancelled before or during the resume, so the client receives that error, once.
            let is_error = |frame: &&&Bytes| {
                let text = frame.escape_ascii().to_string();
                text.contains("-32800") || text.contains("-32001")
            };
            let (errors, passed): (Vec<&Bytes>, Vec<&Bytes>) = passed.iter().partition(is_error);
            let passed: Vec<u8> = passed.into_iter().flatten().copied().collect();
            let before: Vec<u8> = before.into_iter().flatten().copied().collect();
            // A cancelled call's stream is held back until it contains the answer.
            let is_held = passed.is_empty() && !cancelled.is_empty();
            assert!(is_held || passed == before, "the resumed body");
            for error in &errors {
                let times = errors.iter().filter(|other| *other == error).count();
                // An incomplete event is terminated before the error.
                let event = error.trim_ascii_start();
                let id = Json::parse(&event[b"data: ".len()..]);
                let id = id.and_then(|error| error.member("id").ok()?.cloned());
                let of_id = |call: &&Cancelled| Json::parse(call.to_string().as_bytes()) == id;
                assert!(
                    times <= cancelled.iter().filter(of_id).count(),
                    "{error:?} {times} times"
                );
            }
            return;
        }
        assert_eq!(passed, before, "the response body");
    }

    /// Returns the ids whose answers the client has been sent.
    fn answered(&self) -> Vec<RequestId> {
        let outer = self
            .passed
            .get(&Side::ResponseOut)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let (events, _) = by_sseer(outer);
        let verdicts = events
            .iter()
            .filter_map(|event| Some(answer(&Json::parse(event.data.as_bytes())?)));
        let ids = verdicts.filter_map(|verdict| match verdict {
            Verdict::Clear(ids) => Some(ids),
            Verdict::Perhaps(_) | Verdict::Doubtful => None,
        });
        ids.flatten().collect()
    }
}

// === impl Call ===

impl Call {
    fn is_cancelled(&self) -> bool {
        self.cancelled().is_some()
    }

    fn cancelled(&self) -> Option<CancelReason> {
        match self.ended {
            Some(Outcome::Cancelled(reason)) => Some(reason),
            Some(Outcome::ClientCancelled) => Some(CancelReason::ClientCancelled),
            _ => None,
        }
    }
}
