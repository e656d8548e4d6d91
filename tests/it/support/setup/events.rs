//! The layer's reports in order, which tests can await.

use std::{fmt, sync::Arc, time::Duration};

use http::StatusCode;
use mcp_cancel_on_disconnect::{
    CallInfo, Event, Outcome,
    observe::{Limit, ParseFailure},
};
use serde_json::Value;
use tokio::{sync::watch, time::Instant};

use crate::support::{Mcp, within};

/// The log. All clones share the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Arc<watch::Sender<Vec<Seen>>>);

/// The kind of an event, without its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Started,
    Detached(Option<Duration>),
    Resumed,
    Ended(Outcome),
    CancelFailed(Option<StatusCode>),
    Untracked(Limit),
    AnswerEvicted(Outcome),
    UnparsedBody(ParseFailure),
}

#[derive(Clone, Debug)]
struct Seen {
    kind: EventKind,
    at: Instant,
    call: Option<Call>,
}

/// A call as its client knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    session: Option<String>,
    id: Value,
}

/// The message for a failed wait: what it was waiting for, and the log at that time.
struct FailedWait<'a>(&'a Events, &'a str, &'a Call);

// === impl Events ===

impl Events {
    /// Returns an observer that logs what the layer reports.
    ///
    /// It skips the detachment of a call that is cancelled at once, because the event for the end of the call carries
    /// the same information.
    pub(crate) fn observer(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let log = self.0.clone();
        move |event| {
            let seen = Seen::new(event);
            if seen.kind != EventKind::Detached(Some(Duration::ZERO)) {
                log.send_modify(|log| log.push(seen));
            }
        }
    }

    /// Waits until the layer has reported that a client's call has started.
    pub(crate) async fn started(&self, mcp: &Mcp, id: impl Into<Value>) {
        self.count(mcp, id, 1, |kind| kind == EventKind::Started)
            .await;
    }

    /// Waits for a client's call to end, and returns its outcome.
    pub(crate) async fn ended(&self, mcp: &Mcp, id: impl Into<Value>) -> Outcome {
        let (outcome, _) = self.end(mcp, id).await;
        outcome
    }

    /// Like [`Self::ended`], but also returns when the call ended.
    pub(crate) async fn end(&self, mcp: &Mcp, id: impl Into<Value>) -> (Outcome, Instant) {
        self.of_call(mcp, id.into(), "the end", |kind| match kind {
            EventKind::Ended(outcome) => Some(outcome),
            _ => None,
        })
        .await
    }

    /// Waits until a call has been detached and is still running.
    ///
    /// Returns its grace period, and when it was detached.
    pub(crate) async fn detached(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
    ) -> (Option<Duration>, Instant) {
        self.of_call(mcp, id.into(), "the detach", |kind| match kind {
            EventKind::Detached(grace) => Some(grace),
            _ => None,
        })
        .await
    }

    /// Waits for `count` events about a call that `is_counted` accepts.
    ///
    /// Returns when the last of them was reported.
    pub(crate) async fn count(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
        count: usize,
        is_counted: impl Fn(EventKind) -> bool,
    ) -> Instant {
        let call = Call::of(mcp, id.into());
        let mut changes = self.0.subscribe();
        let counted = async {
            loop {
                let nth = {
                    let log = changes.borrow_and_update();
                    let mut seen = log.iter().filter(|seen| {
                        let is_of_call = seen.call.as_ref() == Some(&call);
                        is_of_call && is_counted(seen.kind)
                    });
                    seen.nth(count - 1).map(|seen| seen.at)
                };
                match nth {
                    Some(at) => return at,
                    None => changes.changed().await.expect("the sender is alive"),
                }
            }
        };
        within(FailedWait(self, &format!("event {count}"), &call), counted).await
    }

    /// Waits until calls with this id have ended this many times.
    pub(crate) async fn ended_times(&self, mcp: &Mcp, id: impl Into<Value>, times: usize) {
        let is_counted = |kind| matches!(kind, EventKind::Ended(_));
        self.count(mcp, id, times, is_counted).await;
    }

    /// Waits until a call has been resumed this many times.
    pub(crate) async fn resumed(&self, mcp: &Mcp, id: impl Into<Value>, times: usize) -> Instant {
        let is_counted = |kind| kind == EventKind::Resumed;
        self.count(mcp, id, times, is_counted).await
    }

    /// Waits until a call has been detached this many times.
    pub(crate) async fn detached_again(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
        times: usize,
    ) -> Instant {
        let is_counted = |kind| matches!(kind, EventKind::Detached(_));
        self.count(mcp, id, times, is_counted).await
    }

    /// Returns all events so far for calls with this id in the client's session, or in none.
    pub(crate) fn of(&self, mcp: &Mcp, id: impl Into<Value>) -> Vec<EventKind> {
        let call = Call::of(mcp, id.into());
        let log = self.0.borrow();
        let seen = log.iter().filter(|seen| seen.call.as_ref() == Some(&call));
        seen.map(|seen| seen.kind).collect()
    }

    /// Returns all events so far.
    pub(crate) fn all(&self) -> Vec<EventKind> {
        self.0.borrow().iter().map(|seen| seen.kind).collect()
    }

    /// Waits until `pick` returns a value for one of a call's events.
    ///
    /// Returns the value, and when the event was reported.
    async fn of_call<T>(
        &self,
        mcp: &Mcp,
        id: Value,
        awaited: &str,
        pick: impl Fn(EventKind) -> Option<T>,
    ) -> (T, Instant) {
        let call = Call::of(mcp, id);
        let mut changes = self.0.subscribe();
        let picked = async {
            loop {
                let picked = changes.borrow_and_update().iter().find_map(|seen| {
                    let is_of_call = seen.call.as_ref() == Some(&call);
                    let picked = is_of_call.then(|| pick(seen.kind)).flatten()?;
                    Some((picked, seen.at))
                });
                match picked {
                    Some(picked) => return picked,
                    None => changes.changed().await.expect("the sender is alive"),
                }
            }
        };
        within(FailedWait(self, awaited, &call), picked).await
    }
}

// === impl Seen ===

impl Seen {
    fn new(event: &Event<'_>) -> Self {
        let (kind, call) = match event {
            Event::Started { call, .. } => (EventKind::Started, Some(call)),
            Event::Detached { call, grace, .. } => (EventKind::Detached(*grace), Some(call)),
            Event::Resumed { call, .. } => (EventKind::Resumed, Some(call)),
            Event::Ended { call, outcome, .. } => (EventKind::Ended(*outcome), Some(call)),
            Event::CancelFailed { call, error, .. } => {
                (EventKind::CancelFailed(error.status()), Some(call))
            }
            Event::Untracked { call, limit, .. } => (EventKind::Untracked(*limit), Some(call)),
            Event::AnswerEvicted { outcome, .. } => (EventKind::AnswerEvicted(*outcome), None),
            Event::UnparsedBody { reason, .. } => (EventKind::UnparsedBody(*reason), None),
            other => panic!("unexpected kind of event: {other:?}"),
        };
        Self {
            kind,
            at: Instant::now(),
            call: call.map(|call| Call::from_info(call)),
        }
    }
}

// === impl Call ===

impl Call {
    fn of(mcp: &Mcp, id: Value) -> Self {
        Self {
            session: mcp.session_id().map(str::to_owned),
            id,
        }
    }

    fn from_info(call: &CallInfo) -> Self {
        Self {
            session: call.session().map(str::to_owned),
            id: call.request_id().into(),
        }
    }
}

// === impl FailedWait ===

impl fmt::Display for FailedWait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(events, awaited, call) = self;
        let log = events.0.borrow();
        write!(f, "{awaited} of {call:?}; reported: {:#?}", &*log)
    }
}
