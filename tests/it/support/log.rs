//! A log of what the layer reports.

#![allow(
    unreachable_pub,
    reason = "nothing in a test binary is reachable, so `pub` means that it is for the tests"
)]

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::StatusCode;
use mcp_cancel_on_disconnect::{
    CallInfo, CancelOnDisconnectLayer, CancelReason, Event, Outcome, RequestId,
    observe::ParseFailure,
};

/// The layer's events in order. All clones share the same log.
#[derive(Clone, Debug)]
pub struct Log(Arc<Mutex<Vec<Happened>>>);

/// An event, as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happened {
    Started(Call),
    Detached(Call),
    Ended(Call, Outcome),
    CancelFailed(Call, Option<StatusCode>),
    UnparsedBody(ParseFailure),
    Other(String),
}

/// The call an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub id: RequestId,
    pub method: String,
    pub tool: Option<String>,
    pub has_session: bool,
}

// === impl Log ===

impl Log {
    /// Returns an empty log.
    pub fn new() -> Self {
        Self(Arc::default())
    }

    /// Adds an observer to `layer`, and returns both the layer and the observer's log.
    pub fn of(layer: CancelOnDisconnectLayer) -> (CancelOnDisconnectLayer, Self) {
        let log = Self::new();
        let writer = log.clone();
        let layer = layer.observe(move |event: &Event<'_>| writer.write(event));
        (layer, log)
    }

    /// Returns all events so far.
    pub fn events(&self) -> Vec<Happened> {
        self.lock().clone()
    }

    /// Returns the number of calls that have started so far.
    pub fn started(&self) -> usize {
        let events = self.lock();
        let started = |event: &&Happened| matches!(event, Happened::Started(_));
        events.iter().filter(started).count()
    }

    /// Returns the outcomes so far, in order, for calls with this id.
    pub fn ends(&self, id: &RequestId) -> Vec<Outcome> {
        let ended = |event: &Happened| match event {
            Happened::Ended(call, outcome) if call.id == *id => Some(*outcome),
            _ => None,
        };
        self.lock().iter().filter_map(ended).collect()
    }

    /// Returns the calls that have been cancelled so far, with their reasons.
    pub fn cancelled(&self) -> Vec<(RequestId, CancelReason)> {
        let cancelled = |event: &Happened| match event {
            Happened::Ended(call, Outcome::Cancelled(reason)) => Some((call.id.clone(), *reason)),
            _ => None,
        };
        self.lock().iter().filter_map(cancelled).collect()
    }

    /// Writes an event, unless it is the detachment of a call that is cancelled at once.
    ///
    /// The event for the end of such a call carries the same information.
    fn write(&self, event: &Event<'_>) {
        if let Event::Detached { grace, .. } = event
            && *grace == Some(Duration::ZERO)
        {
            return;
        }
        let happened = match event {
            Event::Started { call, .. } => Happened::Started(Call::of(call)),
            Event::Detached { call, .. } => Happened::Detached(Call::of(call)),
            Event::Ended { call, outcome, .. } => Happened::Ended(Call::of(call), *outcome),
            Event::CancelFailed { call, error, .. } => {
                Happened::CancelFailed(Call::of(call), error.status())
            }
            Event::UnparsedBody { reason, .. } => Happened::UnparsedBody(*reason),
            other => Happened::Other(format!("{other:?}")),
        };
        self.lock().push(happened);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Happened>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Call ===

impl Call {
    pub fn of(call: &CallInfo) -> Self {
        Self {
            id: call.request_id().clone(),
            method: call.method().to_owned(),
            tool: call.tool().map(str::to_owned),
            has_session: call.session().is_some(),
        }
    }
}

/// Returns a numeric call id.
pub fn number(id: i64) -> RequestId {
    RequestId::Number(id)
}
