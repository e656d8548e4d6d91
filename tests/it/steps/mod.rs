//! Steps: something happens at step n, for every n.
//!
//! After each poll of an exchange, and inside each poll of the inner service, the client disconnects or resumes, or the
//! call is cancelled. rmcp is real but runs in process, so that the same steps happen in the same order. The clock only
//! moves when the test advances it.
//!
//! Whatever happens at whichever step, a call ends once, and its token fires if and only if it has been cancelled. The
//! server gets each cancellation at most once, and never one for another call. What the client receives is a prefix of the
//! complete response, and no state remains.

mod inside;
mod world;

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelReason, Outcome};

use self::{
    inside::InPoll,
    world::{Call, Polled, World},
};
use crate::setup::{EventKind, Server};

/// What ends the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handler {
    /// It answers after some steps of its own.
    Answers,
    /// Only its token ends it.
    Waits,
}

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Disconnects,
    /// The client disconnects and resumes its stream, if it can.
    Resumes,
    /// The client resumes its stream before the server notices the disconnect.
    ResumesBeforeDisconnect,
    /// The client disconnects, resumes, and disconnects again.
    ResumesThenDisconnects,
    /// The call is cancelled on the server while its client keeps reading.
    Cancelled,
    CancelledThenDisconnects,
    /// The handler may answer, and the client disconnects this many turns of the runtime later.
    AnswersThenDisconnects(usize),
    /// Something happens inside a poll of the inner service.
    Inside(InPoll),
}

/// The number of polls after which every exchange in these tests is over.
const MAX_STEPS: usize = 200;

const SERVERS: [Server; 4] = [
    Server::Wrapped,
    Server::LayerOnly,
    Server::StatelessSse,
    Server::StatelessJson,
];

#[test]
fn a_disconnect_at_any_step() {
    at_every_step(&[Act::Disconnects]);
}

#[test]
fn a_resume_after_any_step() {
    at_every_step(&[
        Act::Resumes,
        Act::ResumesBeforeDisconnect,
        Act::ResumesThenDisconnects,
    ]);
}

#[test]
fn a_call_that_is_cancelled_at_any_step() {
    at_every_step(&[Act::Cancelled, Act::CancelledThenDisconnects]);
}

#[test]
fn a_disconnect_just_when_the_answer_is_sent() {
    at_every_step(&[0, 1, 2, 4, 8].map(Act::AnswersThenDisconnects));
}

#[test]
fn something_that_happens_inside_any_poll_of_the_inner_service() {
    at_every_step(&[InPoll::Panics, InPoll::Cancels, InPoll::DropsAnother].map(Act::Inside));
}

fn at_every_step(acts: &[Act]) {
    for server in SERVERS {
        for handler in [Handler::Answers, Handler::Waits] {
            let whole = World::run(server, handler, async |world| {
                let mut call = world.call();
                call.read(MAX_STEPS).await;
                (call.polls, call.text)
            });
            for act in acts {
                for step in 0..=last_step(handler, whole.0) {
                    let case = format!("{act:?} at step {step}: {server:?}, {handler:?}");
                    World::run(server, handler, async |world| {
                        world.perform(*act, step, &whole.1, &case).await;
                        world.assert_over(&case).await;
                    });
                }
            }
        }
    }
}

/// Returns the last step to test.
///
/// A waiting handler makes no more progress after some step.
fn last_step(handler: Handler, polls: usize) -> usize {
    match handler {
        Handler::Answers => polls,
        Handler::Waits => 24,
    }
}

// === impl World ===

impl World {
    async fn perform(&mut self, act: Act, step: usize, whole: &str, case: &str) {
        if let Act::Inside(what) = act {
            return self.perform_inside(what, step, whole, case).await;
        }
        let mut call = self.call();
        call.read(step).await;
        assert!(whole.starts_with(&call.text), "{case}: {}", call.text);
        let was_over = call.is_over();
        match act {
            Act::Disconnects => call.disconnect(),
            Act::Resumes => {
                let resumed = self.resume(&call);
                call.disconnect();
                self.read_on(call, resumed, whole, case).await;
            }
            Act::ResumesBeforeDisconnect => {
                let mut resumed = self.resume(&call);
                if let Some(resumed) = &mut resumed {
                    resumed.read(2).await;
                }
                self.read_on(call, resumed, whole, case).await;
            }
            Act::ResumesThenDisconnects => {
                let resumed = self.resume(&call);
                call.disconnect();
                if let Some(mut resumed) = resumed {
                    resumed.read(step % 8).await;
                    resumed.disconnect();
                }
            }
            Act::Cancelled | Act::CancelledThenDisconnects => {
                let cancelled = self.cancel();
                if act == Act::Cancelled {
                    call.read(MAX_STEPS).await;
                    assert!(
                        !cancelled || was_over || call.text.contains("-32800"),
                        "{case}: {}",
                        call.text
                    );
                }
                call.disconnect();
                if cancelled {
                    self.assert_outcome(Outcome::Cancelled(CancelReason::Requested), case);
                }
            }
            Act::AnswersThenDisconnects(turns) => {
                self.release();
                self.turn(turns).await;
                call.disconnect();
            }
            Act::Inside(_) => {}
        }
    }

    /// The client reads the resumed stream in full.
    ///
    /// By then it must have the answer, if there is one.
    async fn read_on(&mut self, mut old: Call, resumed: Option<Call>, whole: &str, case: &str) {
        let before = old.text.clone();
        let can_come_back = resumed.is_some();
        old.disconnect();
        let Some(mut resumed) = resumed else {
            return;
        };
        resumed.read(MAX_STEPS).await;
        let keeps_answers = self.server == Server::Wrapped && can_come_back;
        if keeps_answers && whole.contains("done") {
            assert!(
                before.contains("done") || resumed.text.contains("done"),
                "{case}: {before} and then {}",
                resumed.text
            );
            self.assert_outcome(Outcome::Completed, case);
        }
        resumed.disconnect();
    }

    async fn perform_inside(&mut self, what: InPoll, step: usize, whole: &str, case: &str) {
        self.plan_inside(what, step).await;
        let mut call = self.call();
        call.read(MAX_STEPS).await;
        let panicked = call.last == Polled::Panicked;
        // The other call has the session's first stream.
        let text = match what {
            InPoll::DropsAnother => call.text.replace("/1\n", "/0\n"),
            InPoll::Panics | InPoll::Cancels => call.text.clone(),
        };
        assert!(
            whole.starts_with(&text) || what == InPoll::Cancels,
            "{case}: {text}"
        );
        call.disconnect();
        if panicked {
            assert_eq!(what, InPoll::Panics, "{case}");
        }
    }

    /// Advances the clock and asserts everything that must be true at the end.
    async fn assert_over(&mut self, case: &str) {
        // A jump of the clock makes a deadline late, and a late deadline is postponed once.
        for _ in 0..6 {
            self.pass(Duration::from_secs(8)).await;
        }
        assert!(self.calls.is_empty(), "{case}: {:?}", self.calls.snapshot());
        let events = self.events();
        let ends: Vec<Outcome> = events
            .iter()
            .filter_map(|kind| match kind {
                EventKind::Ended(outcome) => Some(*outcome),
                _ => None,
            })
            .collect();
        let started = events
            .iter()
            .filter(|kind| **kind == EventKind::Started)
            .count();
        assert_eq!(ends.len(), started, "{case}: {events:?}");
        // A call that is dropped before its body has been read is not known as a call.
        let failed = |kind: &EventKind| matches!(kind, EventKind::CancelFailed(_));
        assert!(!events.iter().any(failed), "{case}: {events:?}");
        let cancelled = ends.iter().filter_map(|outcome| match outcome {
            Outcome::Cancelled(reason) => Some(*reason),
            _ => None,
        });
        let cancelled: Vec<_> = cancelled.collect();
        let mut reasons = self.reasons();
        // If a call has ended before its handler started, no handler holds its token.
        assert!(
            reasons.len() <= cancelled.len(),
            "{case}: {reasons:?} for {cancelled:?}"
        );
        reasons.retain(|reason| !cancelled.contains(reason));
        assert!(reasons.is_empty(), "{case}: {reasons:?} for {cancelled:?}");
        assert_eq!(
            self.running(),
            0,
            "{case}: a handler is still running: {events:?}"
        );
        let reached = self.cancelled_ids();
        assert!(
            reached.len() <= cancelled.len(),
            "{case}: cancelled {reached:?}, reported {ends:?}"
        );
        assert!(
            self.server.has_sessions() || reached.is_empty(),
            "{case}: nothing is injected without a session"
        );
    }

    fn assert_outcome(&self, outcome: Outcome, case: &str) {
        let events = self.events();
        assert!(
            events.contains(&EventKind::Ended(outcome)),
            "{case}: {events:?}"
        );
    }
}
