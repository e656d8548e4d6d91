//! Judges whether every answer was delivered to its own client, and nowhere else.
//!
//! - A call's stream contains no answer but that call's own, under its own id, and complete.
//! - A client that is connected when the handler answers receives the answer within a second.
//! - With the session manager, so does a client that resumes after the answer with one of the call's event ids.
//! - A client that resumes an orphan after it was cancelled receives the error -32800.
//! - A client that is connected when its call is cancelled by anything but itself receives an error within a second.
//! - A standalone stream contains no answers. (Without the session manager, rmcp may send a cancelled call's answer
//!   on it.)

use super::{
    history::{CallHistory, End, History, Stream},
    rules::RACE,
};
use crate::clock::{Micros, SECOND};

/// How an answer or error was delivered wrongly, or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Misdelivery {
    /// Another call's answer, an answer under another id, or an incomplete one.
    WrongAnswer,
    /// The client was connected but did not receive the answer.
    LostAnswer,
    /// The client resumed too late, or was connected when the server ended the call. It received no error.
    MissingError,
}

/// How long an answer is retained at least. An idle session is closed later than that.
const MIN_RETENTION: Micros = 5 * SECOND;
const CANCELLED: i64 = -32_800;
const TIMED_OUT: i64 = -32_001;

/// Returns a call's first misdelivery, or `None` if there is none.
pub(super) fn judge(key: &str, call: &CallHistory, history: &History) -> Option<Misdelivery> {
    if call.has_reused_id {
        return None;
    }
    let is_own =
        |(_, id, of, whole): &(Micros, String, String, bool)| *id == call.id && of == key && *whole;
    let answers = call
        .streams
        .iter()
        .filter_map(|stream| stream.answer.as_ref());
    let errors = call
        .streams
        .iter()
        .filter_map(|stream| stream.error.as_ref());
    let text = call.outcome.iter().flatten();
    if !answers.clone().all(is_own)
        || errors
            .clone()
            .any(|(_, id, _)| *id != call.id && id != "null")
        || text.clone().any(|text| text != key)
    {
        return Some(Misdelivery::WrongAnswer);
    }
    let (ended, end) = call.ended?;
    let session = call
        .session
        .as_ref()
        .and_then(|session| history.sessions.get(session));
    let deleting = session
        .and_then(|session| session.deleting)
        .unwrap_or(Micros::MAX);
    let drained = history
        .drains
        .iter()
        .filter(|_| call.setup.is_drained)
        .map(|&(at, _)| at);
    let drained_at = drained
        .filter(|&at| at + SECOND > call.called)
        .min()
        .unwrap_or(Micros::MAX);
    let until = deleting
        .min(drained_at)
        .min(call.cancelling.unwrap_or(Micros::MAX));
    let generations = call.generations();
    for (index, stream) in generations.iter().enumerate() {
        let is_cancelled = end != End::Answered && until > ended;
        if is_cancelled
            && stream.ends_without_error(ended, history)
            && !call.was_polled(stream, ended)
        {
            return Some(Misdelivery::MissingError);
        }
        let later = generations.get(index + 1..).unwrap_or_default();
        // A later stream takes over, unless its client had already disconnected again.
        let takes_over = |later: &&&Stream| {
            let disconnected_at = later.disconnected_from(0).unwrap_or(Micros::MAX);
            later.opened > ended || disconnected_at > ended.saturating_sub(RACE)
        };
        let next = later.iter().find(takes_over);
        let next = next.map_or(Micros::MAX, |next| next.opened);
        let wait = SECOND
            + history.stalls.within(
                stream.opened.max(ended),
                stream.opened.max(ended) + 2 * SECOND,
            );
        let read_until = stream.read_until().min(next).min(until).min(history.end);
        if read_until < stream.opened.max(ended) + wait {
            continue;
        }
        let is_late = stream.opened > ended;
        match end {
            End::Answered if is_late && !call.setup.is_wrapped => {}
            // The head had not been sent when the handler answered. Only the session manager retains answers.
            End::Answered
                if !is_late && !call.setup.is_wrapped && !stream.is_connected_at(ended) => {}
            End::Answered if is_late && stream.opened > ended + MIN_RETENTION => {}
            // The client was asked to resume.
            End::Answered if !is_late && call.was_polled(stream, ended) => {}
            _ if stream.was_replaced(&generations) => {}
            End::Answered if stream.answer.is_none() && stream.error.is_none() => {
                return Some(Misdelivery::LostAnswer);
            }
            End::Token | End::Dropped
                if stream.opened > ended + RACE
                    && stream.opened < ended + MIN_RETENTION
                    && !stream
                        .error
                        .as_ref()
                        .is_some_and(|&(_, _, code)| call.has_error(code)) =>
            {
                return Some(Misdelivery::MissingError);
            }
            _ => {}
        }
    }
    None
}

/// Returns how many answers were wrongly sent on standalone streams.
pub(super) fn stray_answers(history: &History) -> usize {
    let stray_answers = history.standalone.values().filter(|stream| {
        stream.answer.as_ref().is_some_and(|(_, _, of, _)| {
            let call = history.calls.get(of.as_str());
            // rmcp sends a cancelled call's answer within the call's own session.
            call.is_none_or(|call| call.setup.is_wrapped || call.session != stream.session)
        })
    });
    stray_answers.count()
}

// === impl CallHistory ===

impl CallHistory {
    /// Returns `true` if this error explains how the call ended. On a stalled machine, a call may time out before it
    /// becomes an orphan.
    fn has_error(&self, code: i64) -> bool {
        code == CANCELLED || code == TIMED_OUT && self.setup.call_timeout.is_some()
    }

    /// Returns `true` if the server ended this stream on purpose before the handler answered.
    fn was_polled(&self, stream: &Stream, answered: Micros) -> bool {
        let over = stream.over.filter(|&over| over < answered + RACE);
        over.is_some_and(|over| {
            self.polled
                .iter()
                .any(|at| (stream.opened..over).contains(at))
        })
    }
}

// === impl Stream ===

impl Stream {
    /// Returns until when its client was reading.
    fn read_until(&self) -> Micros {
        let closing = self.closing.map(|(at, _)| at);
        // The server ending the stream does not count, because that is no excuse for the server.
        closing
            .into_iter()
            .chain(self.stops)
            .min()
            .unwrap_or(Micros::MAX)
    }

    /// Returns `true` if its client was reading when the call was cancelled but got no error.
    fn ends_without_error(&self, cancelled: Micros, history: &History) -> bool {
        let by = cancelled + SECOND;
        let by = by + history.stalls.within(cancelled, by + SECOND);
        let over = self.over.unwrap_or(Micros::MAX);
        let is_over = (cancelled.saturating_sub(RACE)..by).contains(&over);
        let was_there = self
            .head
            .is_some_and(|(at, status)| status == 200 && at < cancelled);
        was_there && self.error.is_none() && (is_over || over >= by && self.read_until() > by)
    }

    /// Returns `true` if the server ended the stream because its client was connected on another one.
    fn was_replaced(&self, generations: &[&Self]) -> bool {
        let Some(over) = self.over else {
            return false;
        };
        generations.iter().any(|other| {
            let disconnected_at = other.disconnected_by().unwrap_or(Micros::MAX);
            other.number != self.number
                && other.opened < over
                && disconnected_at > over.saturating_sub(RACE)
        })
    }

    /// Returns `true` if its head had arrived and the server had not ended it yet.
    fn is_connected_at(&self, at: Micros) -> bool {
        self.head
            .is_some_and(|(head, status)| status == 200 && head < at)
            && self.over.is_none_or(|over| over > at)
    }
}
