//! The facts, sorted by subject.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use crate::{
    clock::{MILLI, Micros, SECOND},
    fact::{Call, CloseKind, Fact, Gauge, Line, Stream as Number},
    job::{Job, Reaction},
    setup::{GRACE, Setup},
};

/// How long a stream may be open but unread: 2 min. The kernel closes its connection after 90 s.
const MAX_UNREAD: Micros = 120 * SECOND;

/// Everything known about a run.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) calls: HashMap<Call, CallHistory>,
    pub(super) sessions: HashMap<Arc<str>, SessionHistory>,
    /// The standalone streams, which belong to no call.
    pub(super) standalone: HashMap<Number, Stream>,
    /// When a flooding handler's stream was not being read, by session: from when, and until its client had certainly
    /// disconnected.
    pub(super) unread: HashMap<Arc<str>, Vec<(Micros, Micros)>>,
    pub(super) stalls: Stalls,
    pub(super) drains: Vec<(Micros, Option<Micros>)>,
    pub(super) late_drains: usize,
    pub(super) gauges: Vec<(Micros, Gauge)>,
    pub(super) quiet: Vec<Micros>,
    pub(super) fault: Option<String>,
    pub(super) seed: Option<u64>,
    pub(super) end: Micros,
    /// Calls that were about to be sent with an id that was in use.
    reuses: HashSet<Call>,
    /// Facts that no earlier fact accounts for.
    pub(super) unexplained: Vec<String>,
}

#[derive(Debug)]
pub(super) struct CallHistory {
    pub(super) job: Job,
    pub(super) setup: &'static Setup,
    pub(super) client: Arc<str>,
    pub(super) session: Option<Arc<str>>,
    pub(super) id: String,
    pub(super) called: Micros,
    /// The POST's stream, then one per attempt to resume.
    pub(super) streams: Vec<Stream>,
    pub(super) started: Vec<Micros>,
    /// How its handler ended.
    pub(super) ended: Option<(Micros, End)>,
    pub(super) reason: Option<String>,
    pub(super) cancelling: Option<Micros>,
    pub(super) cancelled: Option<Micros>,
    pub(super) polled: Vec<Micros>,
    /// Whether another call used its id at the same time.
    pub(super) has_reused_id: bool,
    pub(super) outcome: Option<Option<String>>,
}

/// How a handler ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Answered,
    Token,
    Dropped,
}

/// A request and its response, as seen by the client.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) number: Number,
    pub(super) session: Option<Arc<str>>,
    pub(super) opened: Micros,
    pub(super) last_event_id: Option<String>,
    pub(super) sent: Option<Micros>,
    pub(super) head: Option<(Micros, u16)>,
    pub(super) event_ids: Vec<String>,
    /// The answer, the handler it is from, and whether it is complete.
    pub(super) answer: Option<(Micros, String, String, bool)>,
    pub(super) error: Option<(Micros, String, i64)>,
    pub(super) stops: Option<Micros>,
    pub(super) closing: Option<(Micros, CloseKind)>,
    pub(super) closed: Option<Micros>,
    pub(super) over: Option<Micros>,
}

#[derive(Debug, Default)]
pub(super) struct SessionHistory {
    pub(super) deleting: Option<Micros>,
    pub(super) deleted: Option<Micros>,
}

/// When a process was not running, as pairs of start and end.
#[derive(Debug, Default)]
pub(super) struct Stalls(pub(super) Vec<(Micros, Micros)>);

// === impl History ===

impl History {
    /// Sorts the facts by subject. They must already be sorted by time.
    pub(super) fn of(lines: &[Line]) -> Self {
        let mut history = Self::default();
        let mut streams: HashMap<Number, Option<Call>> = HashMap::new();
        for line in lines {
            history.end = line.at;
            history.record(line.at, &line.fact, &mut streams);
        }
        history.stalls.merge();
        let floods = |call: &&CallHistory| call.job.reaction == Reaction::Floods;
        for call in history.calls.values().filter(floods) {
            let Some(session) = &call.session else {
                continue;
            };
            for stream in &call.streams {
                if let Some(stops) = stream.stops {
                    let until = stream.disconnected_by().unwrap_or(stops + MAX_UNREAD);
                    let unread = history.unread.entry(session.clone()).or_default();
                    unread.push((stops, until));
                }
            }
        }
        history
    }

    /// Returns until when an unread stream may block the call's session. `None` if none may be blocking it at `at`.
    pub(super) fn blocked_until(&self, call: &CallHistory, at: Micros) -> Option<Micros> {
        let unread = self.unread.get(call.session.as_ref()?)?;
        let at_that_time = unread
            .iter()
            .filter(|(from, until)| (*from..=*until).contains(&at));
        at_that_time.map(|(_, until)| *until).max()
    }

    #[allow(clippy::too_many_lines, reason = "one arm per fact")]
    fn record(&mut self, at: Micros, fact: &Fact, streams: &mut HashMap<Number, Option<Call>>) {
        match fact {
            Fact::Calling {
                call,
                client,
                route,
                session,
                id,
                stream,
            } => {
                let (Ok(job), Some(setup)) = (call.parse(), Setup::of(route)) else {
                    return self.unexplained.push(format!("a call {call} on {route}"));
                };
                streams.insert(*stream, Some(call.clone()));
                let first = Stream::new(*stream, session.clone(), at, None);
                if let Some(call) = self.calls.get_mut(call) {
                    // An SDK has repeated the request.
                    return call.streams.push(first);
                }
                let history = CallHistory {
                    job,
                    setup,
                    client: client.clone(),
                    session: session.clone(),
                    id: id.clone(),
                    called: at,
                    streams: vec![first],
                    started: Vec::new(),
                    ended: None,
                    reason: None,
                    cancelling: None,
                    cancelled: None,
                    polled: Vec::new(),
                    has_reused_id: self.reuses.contains(call),
                    outcome: None,
                };
                self.calls.insert(call.clone(), history);
            }
            Fact::Resuming {
                call,
                session,
                last_event_id,
                stream,
            } => {
                streams.insert(*stream, Some(call.clone()));
                let stream = Stream::new(*stream, session.clone(), at, Some(last_event_id.clone()));
                self.with_call(call, |call| call.streams.push(stream));
            }
            Fact::Listening { session, stream } => {
                streams.insert(*stream, None);
                let listening = Stream::new(*stream, session.clone(), at, None);
                self.standalone.insert(*stream, listening);
            }
            Fact::Started { call } => self.with_call(call, |call| call.started.push(at)),
            Fact::Progressed { .. } | Fact::Probed { .. } => {}
            Fact::Token { call, reason } => self.with_call(call, |call| {
                call.reason.clone_from(reason);
                call.end(at, End::Token);
            }),
            Fact::Answered { call } => self.with_call(call, |call| call.end(at, End::Answered)),
            Fact::Dropped { call } => self.with_call(call, |call| call.end(at, End::Dropped)),
            Fact::Cancelling { call } => self.with_call(call, |call| {
                call.cancelling.get_or_insert(at);
            }),
            Fact::Cancelled { call } => self.with_call(call, |call| call.cancelled = Some(at)),
            Fact::Polling { call } => self.with_call(call, |call| call.polled.push(at)),
            Fact::Outcome { call, text, .. } => {
                self.with_call(call, |call| call.outcome = Some(text.clone()));
            }
            Fact::Reused { call, by } => {
                self.with_call(call, |call| call.has_reused_id = true);
                self.reuses.insert(by.clone());
            }
            Fact::Sent { stream } => {
                self.with_stream(streams, *stream, |stream| stream.sent = Some(at))
            }
            Fact::Head { stream, status } => {
                self.with_stream(streams, *stream, |stream| stream.head = Some((at, *status)));
            }
            Fact::Event { stream, id } => {
                self.with_stream(streams, *stream, |stream| {
                    stream.event_ids.extend(id.clone())
                });
            }
            Fact::Answer {
                stream,
                id,
                of,
                whole,
            } => {
                let answer = (at, id.clone(), of.clone(), *whole);
                self.with_stream(streams, *stream, |stream| stream.answer = Some(answer));
            }
            Fact::Error { stream, id, code } => {
                let error = (at, id.clone(), *code);
                self.with_stream(streams, *stream, |stream| stream.error = Some(error));
            }
            Fact::Stops { stream } => {
                self.with_stream(streams, *stream, |stream| stream.stops = Some(at))
            }
            Fact::Closing { stream, how } => {
                self.with_stream(streams, *stream, |stream| stream.closing = Some((at, *how)));
            }
            Fact::Closed { stream } => {
                self.with_stream(streams, *stream, |stream| stream.closed = Some(at))
            }
            Fact::StreamEnded { stream, .. } => {
                self.with_stream(streams, *stream, |stream| stream.over = Some(at))
            }
            Fact::Deleting { session } => {
                let session = self.sessions.entry(session.clone()).or_default();
                session.deleting.get_or_insert(at);
            }
            Fact::Deleted { session, status } => {
                let session = self.sessions.entry(session.clone()).or_default();
                if (200..300).contains(status) {
                    session.deleted.get_or_insert(at);
                }
            }
            Fact::Draining => self.drains.push((at, None)),
            Fact::Drained { in_time, .. } => {
                self.late_drains += usize::from(!in_time);
                if let Some(drain) = self.drains.last_mut() {
                    drain.1 = Some(at);
                }
            }
            Fact::Serving => {}
            Fact::Gauge(gauge) => self.gauges.push((at, gauge.clone())),
            Fact::Quiet => self.quiet.push(at),
            Fact::Stalled { millis } => {
                self.stalls.0.push((at.saturating_sub(millis * MILLI), at));
            }
            Fact::Seed { seed } => self.seed = Some(*seed),
            Fact::Fault { name } => self.fault = Some(name.clone()),
        }
    }

    /// Changes a call, or records it as unexplained if no client has made it.
    fn with_call(&mut self, call: &Call, act: impl FnOnce(&mut CallHistory)) {
        match self.calls.get_mut(call) {
            Some(call) => act(call),
            None => self.unexplained.push(format!("no client made {call}")),
        }
    }

    /// Changes a stream. Does nothing if no client has opened it.
    fn with_stream(
        &mut self,
        streams: &HashMap<Number, Option<Call>>,
        number: Number,
        act: impl FnOnce(&mut Stream),
    ) {
        let stream = match streams.get(&number) {
            Some(Some(call)) => {
                let call = self.calls.get_mut(call);
                call.and_then(|call| {
                    call.streams
                        .iter_mut()
                        .find(|stream| stream.number == number)
                })
            }
            Some(None) => self.standalone.get_mut(&number),
            None => None,
        };
        if let Some(stream) = stream {
            act(stream);
        }
    }
}

// === impl CallHistory ===

impl CallHistory {
    fn end(&mut self, at: Micros, end: End) {
        self.ended.get_or_insert((at, end));
    }

    /// Returns the call's grace period.
    pub(super) fn grace(&self) -> Micros {
        if self.session.is_some() { GRACE } else { 0 }
    }

    /// Returns when its handler first started, or `None` if it never did.
    pub(super) fn start(&self) -> Option<Micros> {
        self.started.first().copied()
    }

    /// Returns when its handler would have ended on its own, or `None` if it never started.
    pub(super) fn natural_end(&self) -> Option<Micros> {
        let work = u64::try_from(self.job.work.as_micros()).unwrap_or(u64::MAX);
        self.start().map(|start| start + work)
    }

    /// Returns the call's streams: the first one, and each resume after an event from an earlier stream.
    pub(super) fn generations(&self) -> Vec<&Stream> {
        let mut event_ids: Vec<&str> = Vec::new();
        let mut generations: Vec<&Stream> = Vec::new();
        for stream in &self.streams {
            let is_own = match &stream.last_event_id {
                None => generations.is_empty(),
                Some(id) => stream.session == self.session && event_ids.contains(&id.as_str()),
            };
            if is_own {
                event_ids.extend(stream.event_ids.iter().map(String::as_str));
                generations.push(stream);
            }
        }
        generations
    }
}

// === impl Stream ===

impl Stream {
    fn new(
        number: Number,
        session: Option<Arc<str>>,
        opened: Micros,
        last_event_id: Option<String>,
    ) -> Self {
        Self {
            number,
            session,
            opened,
            last_event_id,
            sent: None,
            head: None,
            event_ids: Vec::new(),
            answer: None,
            error: None,
            stops: None,
            closing: None,
            closed: None,
            over: None,
        }
    }

    /// Returns when its client may first have disconnected, or the server may first have ended the stream.
    ///
    /// Returns `None` if neither has happened. `slack` is how long after the stream ended the client may have seen it end.
    pub(super) fn disconnected_from(&self, slack: Micros) -> Option<Micros> {
        let closing = self.closing.map(|(at, _)| at);
        let over = self
            .over
            .map(|at| at.saturating_sub(slack).max(self.opened));
        closing.into_iter().chain(over).min()
    }

    /// Returns when its client had certainly disconnected, or `None` if it had not.
    pub(super) fn disconnected_by(&self) -> Option<Micros> {
        self.closed.into_iter().chain(self.over).min()
    }
}

// === impl Stalls ===

impl Stalls {
    /// Merges overlapping stalls. Every thread that watches records when the machine stalls.
    fn merge(&mut self) {
        self.0.sort_unstable();
        self.0.dedup_by(|later, earlier| {
            let overlaps = later.0 <= earlier.1;
            if overlaps {
                earlier.1 = earlier.1.max(later.1);
            }
            overlaps
        });
    }

    /// Returns how long the stalls between `from` and `to` lasted in total.
    pub(super) fn within(&self, from: Micros, to: Micros) -> Micros {
        let overlap =
            |&(started, ended): &(Micros, Micros)| ended.min(to).saturating_sub(started.max(from));
        self.near(from, to).map(overlap).sum()
    }

    /// Returns the length of the longest stall that overlaps this interval.
    pub(super) fn longest(&self, from: Micros, to: Micros) -> Micros {
        self.near(from, to)
            .map(|(started, ended)| ended - started)
            .max()
            .unwrap_or(0)
    }

    /// Returns how many stalls overlap this interval.
    pub(super) fn count(&self, from: Micros, to: Micros) -> u64 {
        self.near(from, to).map(|_| 1).sum()
    }

    pub(super) fn total(&self) -> Micros {
        self.0.iter().map(|(started, ended)| ended - started).sum()
    }

    fn near(&self, from: Micros, to: Micros) -> impl Iterator<Item = &(Micros, Micros)> {
        let before = self.0.partition_point(|&(started, _)| started < to);
        // The stalls are sorted by their start, and none lasts a whole minute.
        let far = from.saturating_sub(60_000 * MILLI);
        let after = self.0.partition_point(|&(started, _)| started < far);
        self.0[after..before]
            .iter()
            .filter(move |&&(_, ended)| ended > from)
    }
}
