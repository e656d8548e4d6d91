//! The expected outcome of a story.
//!
//! It is derived only from what the manual promises about grace periods and retained answers.

use std::time::Duration;

use mcp_cancel_on_disconnect::{Grace, MIN_GRACE, Outcome};

use super::{
    story::{CallStory, Story},
    world::{CallHistory, ClientFact, HandlerEnd, History, Report},
};
use crate::setup::Server;

const SECOND: Duration = Duration::from_secs(1);

/// Two times that are closer than this are not judged, because either could be the first.
const CLOSE: Duration = Duration::from_millis(1_500);

/// The minimum time for which an answer is retained.
const MIN_RETENTION: Duration = Duration::from_secs(60);

/// A call's detachment from its client's point of view.
struct Detachment<'a> {
    story: &'a Story,
    since: Duration,
    by_server: bool,
    retry: Duration,
    can_return: bool,
    is_resumed_elsewhere: bool,
}

/// How a handler must end.
#[derive(Clone, Copy, Debug)]
enum Expected {
    CompletedAt(Duration),
    CancelledAt(Duration),
    /// Two times are too close to each other to be judged.
    Anything,
}

/// Returns what is wrong with a history, or `None` if nothing is.
pub(super) fn fault(story: &Story, history: &History) -> Option<String> {
    let calls = story.calls.iter().zip(&history.calls).enumerate();
    let fault = calls.filter_map(|(id, (call, its))| {
        let fault = fault_of_call(story, call, its, history);
        let fault = fault.or_else(|| fault_of_reports(story, its));
        fault.map(|fault| format!("call {id}: {fault}"))
    });
    let mut fault = fault.take(1);
    fault.next().or_else(|| {
        if history.left > 0 {
            return Some(format!("{} calls remain", history.left));
        }
        let is_open = story.server == Server::Wrapped && history.sessions > 0;
        is_open.then(|| "its session is never closed".to_owned())
    })
}

fn fault_of_call(
    story: &Story,
    call: &CallStory,
    its: &CallHistory,
    history: &History,
) -> Option<String> {
    let Some((called_at, ClientFact::Called)) = its.client.first() else {
        return Some("the call was never sent".to_owned());
    };
    let completes = *called_at + call.lasts;
    let mut expected = Expected::CompletedAt(completes);
    let mut asked_times = 0;
    for (at, fact) in its.client.windows(2).map(|pair| (pair, &pair[0].1)) {
        let (since, next) = (at[0].0, &at[1]);
        let ClientFact::Lost {
            by_server,
            retry,
            can_return,
            is_resumed_elsewhere,
        } = fact
        else {
            continue;
        };
        let (known, possible) = retries_of_session(story, history, since);
        let [away, away_at_most] = [known, possible].map(|retry_of_session| Detachment {
            story,
            since,
            by_server: *by_server,
            retry: retry.unwrap_or_default().max(retry_of_session),
            can_return: *can_return,
            is_resumed_elsewhere: *is_resumed_elsewhere,
        });
        if away.grace() != away_at_most.grace() {
            return None;
        }
        let resumed = match next {
            (resumed, ClientFact::Returned { status }) => Some((*resumed, *status)),
            _ => None,
        };
        if completes < since {
            // A client that resumes after this has no guarantee.
            break;
        }
        let until = resumed.map_or(Duration::MAX, |(resumed, _)| resumed.min(completes));
        let is_close = |one: Duration| {
            one.abs_diff(completes) < CLOSE
                || resumed.is_some_and(|(resumed, _)| one.abs_diff(resumed) < CLOSE)
        };
        // `None` means that the outcome cannot be judged.
        let deadline = away.deadline(until.min(completes), &mut asked_times, is_close)?;
        if deadline.is_some_and(|deadline| deadline < until.min(completes)) {
            expected = Expected::CancelledAt(deadline.unwrap_or_default());
            break;
        }
        let Some((resumed, status)) = resumed else {
            break;
        };
        if resumed.abs_diff(completes) < CLOSE {
            expected = Expected::Anything;
            break;
        }
        if resumed < completes {
            if status != 200 {
                return Some(format!("back in time at {resumed:?}, and got {status}"));
            }
            continue;
        }
        // The call has completed while its client was disconnected.
        if story.server == Server::LayerOnly {
            break;
        }
        let whole = completes + away.max_absence().max(MIN_RETENTION);
        let kept_until = whole.max(deadline.unwrap_or_default());
        if resumed + CLOSE > kept_until {
            break;
        }
        let answered = its
            .client
            .iter()
            .any(|(at, fact)| *at >= resumed && *fact == ClientFact::Answered);
        if status != 200 || !answered {
            return Some(format!(
                "back at {resumed:?} with status {status} for an answer that is kept until {kept_until:?}"
            ));
        }
        break;
    }
    let is_right = match (expected, its.handler) {
        (Expected::Anything, _) => true,
        (Expected::CompletedAt(at), Some((ended, HandlerEnd::Completed)))
        | (Expected::CancelledAt(at), Some((ended, HandlerEnd::Cancelled))) => {
            at.abs_diff(ended) < CLOSE
        }
        _ => false,
    };
    (!is_right).then(|| {
        format!(
            "expected {expected:?}, but the handler has {:?}",
            its.handler
        )
    })
}

/// Returns the longest `retry` of the session's streams that have ended by this time.
///
/// The result is a lower and an upper bound. The `retry` is remembered while the session has a call in flight. Streams
/// that ended at almost the same time may or may not count.
fn retries_of_session(story: &Story, history: &History, time: Duration) -> (Duration, Duration) {
    let (mut at_least, mut at_most) = (Duration::ZERO, Duration::ZERO);
    for call in &history.calls {
        let has_ended = |(at, report): &(Duration, Report)| {
            matches!(report, Report::Ended(_)) && *at < time + CLOSE
        };
        let is_in_flight = !call.reports.iter().any(has_ended);
        for (at, fact) in &call.client {
            let (retry, is_lost) = match fact {
                ClientFact::Lost { retry, .. } => (retry, true),
                // The layer alone also counts a stream that has ended with the answer.
                ClientFact::Answered => (&story.retry, false),
                _ => continue,
            };
            let Some(retry) = retry else {
                continue;
            };
            if *at < time + CLOSE {
                at_most = at_most.max(*retry);
            }
            if is_lost && is_in_flight && *at + CLOSE < time {
                at_least = at_least.max(*retry);
            }
        }
    }
    (at_least, at_most)
}

/// Checks that nothing is reported twice, and that each report fits the previous one.
fn fault_of_reports(story: &Story, its: &CallHistory) -> Option<String> {
    let mut is_attached = false;
    let mut is_over = false;
    for (nth, (at, report)) in its.reports.iter().enumerate() {
        let is_right = match report {
            Report::Started => nth == 0,
            Report::Detached(_) => is_attached && !is_over,
            Report::Resumed => nth > 0 && !is_over,
            Report::Ended(_) => nth > 0 && !is_over,
        };
        if !is_right {
            return Some(format!("{report:?} at {at:?} in {:?}", its.reports));
        }
        is_attached = matches!(report, Report::Started | Report::Resumed);
        is_over = matches!(report, Report::Ended(_));
    }
    let outcome = match its.reports.last() {
        Some((_, Report::Ended(outcome))) => *outcome,
        _ => {
            return Some(format!(
                "the end of the call is not reported: {:?}",
                its.reports
            ));
        }
    };
    let is_right = match its.handler {
        // The layer alone cannot observe an answer to a client that is disconnected.
        Some((_, HandlerEnd::Completed)) => {
            outcome == Outcome::Completed || story.server == Server::LayerOnly
        }
        Some((_, HandlerEnd::Cancelled)) => matches!(outcome, Outcome::Cancelled(_)),
        None => false,
    };
    (!is_right).then(|| format!("{outcome:?} is reported for {:?}", its.handler))
}

// === impl Detachment ===

impl Detachment<'_> {
    /// Returns when the call is cancelled if it has no client and no answer by `until`.
    ///
    /// `Some(None)` means never. Returns `None` if the time is too close to another one to be judged.
    fn deadline(
        &self,
        until: Duration,
        postponed: &mut u32,
        is_close: impl Fn(Duration) -> bool,
    ) -> Option<Option<Duration>> {
        let Some(grace) = self.grace() else {
            return Some(None);
        };
        let mut deadline = self.since + grace;
        if is_close(deadline) {
            return None;
        }
        if grace.is_zero() {
            return Some(Some(deadline));
        }
        if let Some(confirm) = self.story.confirm {
            while *postponed < confirm.times && deadline < until {
                *postponed += 1;
                deadline += confirm.wait;
                if is_close(deadline) {
                    return None;
                }
            }
        }
        Some(Some(deadline))
    }

    /// Returns `None` if the call keeps running.
    fn grace(&self) -> Option<Duration> {
        if self.is_resumed_elsewhere || self.story.is_exempt {
            return None;
        }
        match self.story.grace {
            Grace::Never => None,
            Grace::Immediate if !self.by_server => Some(Duration::ZERO),
            Grace::After(grace) => Some(grace.max(self.resume_time())),
            _ if !self.can_return => (!self.by_server).then_some(Duration::ZERO),
            _ if self.story.is_stored => None,
            _ => Some(self.resume_grace()),
        }
    }

    /// Returns how long the client can still get the answer.
    fn max_absence(&self) -> Duration {
        match self.grace() {
            Some(grace) => grace,
            None if self.can_return => self.resume_grace(),
            None => Duration::ZERO,
        }
    }

    fn resume_grace(&self) -> Duration {
        let attempts = 5 * self.retry.min(600 * SECOND) + 5 * SECOND;
        MIN_GRACE.max(attempts).max(self.resume_time())
    }

    /// Returns the `retry`, plus time for the network.
    fn resume_time(&self) -> Duration {
        if self.can_return {
            self.retry + self.retry.min(5 * SECOND)
        } else {
            Duration::ZERO
        }
    }
}
