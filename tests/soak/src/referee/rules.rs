//! The rules: when a call may be cancelled, by when it must be cancelled, and whether it actually ended that way.
//!
//! Calls in a session follow the policy in `src/policy.rs` with `Grace::After(GRACE)`, and all others follow that file's table: without
//! a session there is no event id, so a disconnect cancels the call immediately, as in 2026-07-28.
//!
//! | what the client did | the token may fire from | the handler must have stopped by |
//! |---|---|---|
//! | closed its last stream, or read its end without the answer | then + grace period | then + grace + 1 s |
//! | resumed within the grace period with one of the call's event ids | that absence allows and demands nothing | |
//! | closed a stream but still has another | nothing | nothing |
//! | resumed within [`RACE`] of the grace period's end | likewise, for a while | nothing |
//! | closed a resume before its head arrived | from the previous disconnect | as if it had just disconnected |
//! | sent `notifications/cancelled` | then | its 202 + 1 s |
//! | sent a DELETE | then | its 2xx + 1 s; without the session manager, plus rmcp's 5 s |
//! | did not read, with a stall timeout | then + stall timeout + grace period | (nothing, because the kernel reads for it) |
//!
//! | what the server did | | |
//! |---|---|---|
//! | has a call timeout | request + timeout | start + timeout + 1 s |
//! | started to drain | then | then + the drain's limit + 1 s, and 1 s for cancellations to be accepted |
//!
//! Without the session manager, a deleted session accepts no cancellations, so rmcp's 5 s apply instead.
//!
//! Each "must" is extended by however long processes were stalled while an event had to be noticed or handled. It is also extended by
//! `POSTPONE_TIME` if the layer noticed a deadline more than a second late and therefore postponed it. A grace period's deadline is
//! extended by 100 ms per stall, up to ten times, because the layer checks again after noticing a deadline late. A handler that ignores its
//! token is given `Setup::abort` on top.
//!
//! rmcp's worker waits for a session's slowest stream. So while a client is not reading one of them, no cancellation reaches the session's
//! handlers, and each "must" is extended until that client has disconnected.
//!
//! A call must complete if nothing allows it to be cancelled before its natural end, and it must be cancelled if a rule demands that
//! before its natural end. All other calls may do either. A call whose id was used by two calls at once may do anything, because the
//! specification forbids that and the layer stops tracking the older one.

use super::history::{CallHistory, End, History, Stream};
use crate::{
    clock::{MILLI, Micros, SECOND},
    setup::{
        DRAIN, EARLY_TOLERANCE, MARGIN, MAX_RECHECKS, POSTPONE_TIME, RECHECK_DELAY, RMCP_DRAIN,
    },
};

/// How long a request may take to reach the layer on a machine that does not stall.
pub(super) const RACE: Micros = 250 * MILLI;

/// How a call is expected to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    MustComplete,
    MustBeCancelled,
    Either,
    /// Its handler never started, because the client disconnected or the server stopped too early.
    NeverStarted,
}

/// How a call violated the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Violation {
    FalseCancel,
    Zombie,
    /// Its handler ran more than once.
    RanTwice,
}

/// An interval in which the token may fire.
#[derive(Debug, Clone, Copy)]
struct Allowed {
    from: Micros,
    to: Micros,
}

/// What the facts imply for when one call may and must end.
#[derive(Debug, Default)]
struct Bounds {
    allowed: Vec<Allowed>,
    must_by: Vec<Micros>,
}

/// Returns a call's class and, if it violated the rules, how.
///
/// A handler that has not ended counts as answering at the end of the run.
pub(super) fn judge(call: &CallHistory, history: &History) -> (Class, Option<Violation>) {
    let (Some(start), Some(natural_end)) = (call.start(), call.natural_end()) else {
        return (Class::NeverStarted, None);
    };
    if call.has_reused_id {
        return (Class::Either, None);
    }
    let bounds = Bounds::of(call, start, history);
    // The handler itself may be late.
    let (ended, end) = call.ended.unwrap_or((history.end, End::Answered));
    let natural_end = if end == End::Answered {
        natural_end.max(ended)
    } else {
        natural_end
    };
    let must_by = bounds.must_by.iter().copied().min();
    let class = if must_by.is_some_and(|by| by < natural_end) {
        Class::MustBeCancelled
    } else if bounds
        .allowed
        .iter()
        .all(|allowed| allowed.from > natural_end)
    {
        Class::MustComplete
    } else {
        Class::Either
    };
    let is_allowed = |at: Micros| {
        bounds
            .allowed
            .iter()
            .any(|allowed| (allowed.from..=allowed.to).contains(&at))
    };
    let wrong = if call.started.len() > 1 {
        Some(Violation::RanTwice)
    } else if must_by.is_some_and(|by| ended > by) {
        Some(Violation::Zombie)
    } else if end != End::Answered && !is_allowed(ended) {
        Some(Violation::FalseCancel)
    } else {
        None
    };
    (class, wrong)
}

// === impl Bounds ===

impl Bounds {
    fn of(call: &CallHistory, start: Micros, history: &History) -> Self {
        let mut bounds = Self::default();
        bounds.add_disconnects(call, history);
        bounds.add_cancels_of_client(call, history);
        bounds.add_cancels_of_server(call, start, history);
        for by in &mut bounds.must_by {
            if let Some(until) = history.blocked_until(call, *by) {
                *by = until.saturating_add(MARGIN + history.stalls.within(until, until + MARGIN));
            }
        }
        bounds
    }

    /// Adds what follows from the times during which the client had no stream of the call.
    fn add_disconnects(&mut self, call: &CallHistory, history: &History) {
        let generations = call.generations();
        // A resume that may not have been accepted does not end an absence.
        let accepted = generations
            .iter()
            .filter(|stream| stream.last_event_id.is_none() || was_accepted(stream));
        let connected_at_least = accepted.map(|stream| {
            let slack = RACE
                + history
                    .stalls
                    .within(stream.opened, stream.over.unwrap_or(stream.opened));
            let accepted = stream.head.map_or(stream.opened, |(at, _)| at);
            (
                stream.opened,
                stream.connected_until(stream.disconnected_from(slack)),
                accepted,
            )
        });
        for (from, next) in without_stream(connected_at_least) {
            let deadline = from + call.grace();
            // A stalled server does not notice a resume until the stall is over.
            let sent = next.map_or(deadline, |(opened, _)| opened.min(deadline));
            let since = sent.min(deadline.saturating_sub(RACE));
            let late = RACE + history.stalls.within(since, deadline + RACE);
            match next {
                // The resume was in time.
                Some((opened, _)) if opened + late < deadline => {}
                Some((_, accepted)) => self.allow(deadline, accepted + MARGIN + late),
                None => self.allow(deadline, Micros::MAX),
            }
        }
        let connected_at_most = generations.iter().map(|stream| {
            (
                stream.opened,
                stream.connected_until(stream.disconnected_by()),
                0,
            )
        });
        for (by, next) in without_stream(connected_at_most) {
            let deadline = by + call.grace();
            let must_by = self.with_margin(deadline, call, history);
            let stalls = history.stalls.count(deadline.saturating_sub(RACE), must_by);
            let must_by = must_by + RECHECK_DELAY * stalls.min(MAX_RECHECKS);
            let must_by = must_by.max(rmcp_drain_end(call, history).unwrap_or(0));
            if next.is_none_or(|(opened, _)| opened > must_by) {
                self.must_by.push(must_by);
            }
        }
        if let Some(stall) = call.setup.stall_timeout {
            for stops in generations.iter().filter_map(|stream| stream.stops) {
                self.allow(
                    (stops + micros(stall) + call.grace()).saturating_sub(RACE),
                    Micros::MAX,
                );
            }
        }
    }

    /// Adds what follows from the client's cancellation and from its DELETE.
    fn add_cancels_of_client(&mut self, call: &CallHistory, history: &History) {
        if let Some(cancelling) = call.cancelling {
            self.allow(cancelling, Micros::MAX);
        }
        // A cancellation that arrives before its call has no effect.
        let starts_before = |at: Micros| call.start().is_some_and(|start| start < at);
        if let Some(cancelled) = call
            .cancelled
            .filter(|_| call.cancelling.is_some_and(starts_before))
        {
            self.require(cancelled, call, history);
        }
        let session = call
            .session
            .as_ref()
            .and_then(|session| history.sessions.get(session));
        if let Some(deleting) = session.and_then(|session| session.deleting) {
            self.allow(deleting, Micros::MAX);
            let deleted = session.and_then(|session| session.deleted);
            if let Some(deleted) = deleted.filter(|_| starts_before(deleting)) {
                let more = if call.setup.is_wrapped { 0 } else { RMCP_DRAIN };
                self.require(deleted + more, call, history);
            }
        }
    }

    /// Adds what follows from the call timeout and from drains.
    fn add_cancels_of_server(&mut self, call: &CallHistory, start: Micros, history: &History) {
        if let Some(timeout) = call.setup.call_timeout {
            self.allow(call.called + micros(timeout), Micros::MAX);
            self.require(start + micros(timeout), call, history);
        }
        if call.setup.is_drained {
            for &(draining, drained) in &history.drains {
                let over = drained.unwrap_or(Micros::MAX);
                if call.called < over && call.ended.is_none_or(|(at, _)| at > draining) {
                    self.allow(draining, Micros::MAX);
                    let limit = (draining + micros(DRAIN)).max(start);
                    self.require(limit + SECOND, call, history);
                }
            }
        }
    }

    /// Allows the token to fire in this interval.
    fn allow(&mut self, from: Micros, to: Micros) {
        let from = from.saturating_sub(EARLY_TOLERANCE);
        self.allowed.push(Allowed { from, to });
    }

    /// Requires the handler to have stopped by this deadline, plus the margin.
    fn require(&mut self, deadline: Micros, call: &CallHistory, history: &History) {
        let by = self.with_margin(deadline, call, history);
        self.must_by.push(by);
    }

    /// Extends a deadline by [`MARGIN`] and by the machine's stalls. With `Setup::abort`, the handler gets that time on top.
    fn with_margin(&self, deadline: Micros, call: &CallHistory, history: &History) -> Micros {
        let window = call.setup.abort.map_or(0, micros);
        let by = deadline + MARGIN + window;
        // By then the server had to notice what the client did; by the deadline it had to handle it.
        let noticed = deadline.saturating_sub(call.grace());
        let late = history
            .stalls
            .within(noticed, (noticed + RACE).min(deadline));
        let stalled = late + history.stalls.within(deadline, by + late);
        let by = by + stalled + history.stalls.within(by, by + stalled);
        let from = deadline.saturating_sub(RACE);
        if history.stalls.longest(from, by) > SECOND * 8 / 10 {
            return by + POSTPONE_TIME;
        }
        by
    }
}

/// Returns when rmcp must have ended the handlers of a deleted session. Such a session accepts none of the layer's cancels.
///
/// Returns `None` if the session has not been deleted or has the session manager.
fn rmcp_drain_end(call: &CallHistory, history: &History) -> Option<Micros> {
    let session = history.sessions.get(call.session.as_ref()?)?;
    let deleting = session.deleting.filter(|_| !call.setup.is_wrapped)?;
    Some(session.deleted.unwrap_or(deleting) + RMCP_DRAIN + MARGIN)
}

/// Returns the intervals in which none of these streams was open. Each has the times at which the next stream was opened and accepted.
fn without_stream(
    streams: impl Iterator<Item = (Micros, Micros, Micros)>,
) -> Vec<(Micros, Option<(Micros, Micros)>)> {
    let mut streams: Vec<_> = streams.collect();
    streams.sort_unstable();
    let mut without_stream = Vec::new();
    let mut connected_until = None;
    for (opened, to, accepted) in streams {
        if let Some(from) = connected_until.filter(|from| *from < opened) {
            without_stream.push((from, Some((opened, accepted))));
        }
        connected_until = connected_until.max(Some(to));
    }
    without_stream.extend(
        connected_until
            .filter(|to| *to < Micros::MAX)
            .map(|from| (from, None)),
    );
    without_stream
}

impl Stream {
    /// Returns until when its client was connected. A client that has the answer does not count as disconnected.
    fn connected_until(&self, disconnected_at: Option<Micros>) -> Micros {
        let disconnected_at = disconnected_at.filter(|_| self.answer.is_none());
        disconnected_at.unwrap_or(Micros::MAX)
    }
}

/// Returns `true` if the layer must have accepted a resume.
///
/// This is the case if the head is a 200, or if the client stayed for more than a second.
fn was_accepted(stream: &Stream) -> bool {
    stream.head.is_some_and(|(_, status)| status == 200)
        || stream
            .disconnected_from(0)
            .is_some_and(|disconnected_at| disconnected_at > stream.opened + SECOND)
        || stream.disconnected_from(0).is_none()
}

pub(super) fn micros(duration: std::time::Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
