//! What a client receives when it resumes a call that has ended.
//!
//! With the wrapper, the answer to a completed call is retained. A cancelled call's client gets an error in either
//! setup, in the one form that stops its requests.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelReason, Grace, Limits, Outcome, Policy, RetainAnswers};
use serde_json::{Value, json};
use tracing::Level;

use crate::{
    setup::{
        EventKind, FIRST_EVENT, GRACE, Lines, ORPHANED, Plan, Server, Setup, StoppedClock, TICK,
        arguments, for_servers, stalled,
    },
    support::*,
};

/// How long an ended call is retained.
const RETENTION: Duration = Duration::from_secs(60);

const EVICTED: EventKind = EventKind::AnswerEvicted(Outcome::Completed);

for_servers!(sessions {
    a_resume_of_an_orphan_gets_the_error_alone,
    a_resume_of_a_call_that_its_client_cancelled_gets_the_error_alone,
    the_error_of_a_cancelled_call_has_the_id_that_its_client_gave_it,
    an_answer_that_coincides_with_the_disconnect_is_an_answer,
});

#[tokio::test]
async fn a_late_answer_is_delivered_on_every_resume_until_it_expires() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;
    finish(&setup, &mcp, 1, "a").await;

    for wait in [Duration::ZERO, RETENTION / 2, RETENTION / 2 - TICK] {
        clock.advance(wait).await;
        assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    }

    clock.advance(TICK * 2).await;
    assert_eq!(events(&mcp, FIRST_EVENT).await, [], "as with rmcp alone");
    let expected = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        EventKind::Ended(Outcome::Completed),
    ];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

#[tokio::test]
async fn an_ended_call_is_retained_for_as_long_as_its_grace() {
    let grace = RETENTION * 3;
    let clock = StoppedClock::stop();
    let setup = Plan::of(Server::Wrapped).grace(Grace::After(grace));
    let (setup, mcp) = setup.client().await;
    setup.cut(&mcp, 1, "a").await;
    finish(&setup, &mcp, 1, "a").await;

    clock.advance(grace - TICK).await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    clock.advance(TICK * 2).await;
    assert_eq!(events(&mcp, FIRST_EVENT).await, []);
}

/// The process is suspended one second after the call has completed.
///
/// Its client resumes after `retry`, and waits in the accept queue. By the time the process continues, the answer has
/// expired, and the timer runs before the queue is served.
#[tokio::test]
async fn a_resume_that_waits_for_a_suspended_process_gets_the_retained_answer() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    finish(&setup, &mcp, 1, "a").await;
    clock.advance(Duration::from_secs(1)).await;

    clock.jump(RETENTION + GRACE).await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    clock.advance(Duration::from_secs(5) + TICK).await;
    assert_eq!(events(&mcp, FIRST_EVENT).await, [], "postponed only once");
}

/// Without the error, the SDK would wait for its own timeout.
#[tokio::test]
async fn a_resume_that_waits_for_a_suspended_process_gets_the_retained_error() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
    clock.advance(Duration::from_secs(1)).await;

    clock.jump(RETENTION + GRACE).await;

    let expected = [cancelled(json!(1), CancelReason::Orphaned)];
    assert_eq!(events(&mcp, FIRST_EVENT).await, expected);
}

/// The server has ended the stream (SEP-1699), so neither a client nor a task is reading it.
#[tokio::test]
async fn an_answer_between_two_polls_is_retained() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped).client().await;
    end_stream(&setup, &mcp).await;

    finish(&setup, &mcp, 1, "a").await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    assert_eq!(setup.calls.len(), 0);
}

/// The client has resumed after the server ended its stream.
///
/// The recorded end of that stream must no longer count.
#[tokio::test]
async fn an_answer_after_a_poll_is_sent_to_the_client_that_resumed() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped).client().await;
    end_stream(&setup, &mcp).await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;

    setup.assert_completes("a", &mut resumed).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

/// The control. Bare rmcp loses the answer as well.
#[tokio::test]
async fn without_the_wrapper_a_late_answer_is_lost() {
    for server in [Server::LayerOnly, Server::Bare] {
        let (setup, mcp) = Plan::of(server).grace(Grace::Never).client().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        call.head().await;
        call.fin();
        setup.exchanges.over_for("a").await;
        setup.witness.release("a");
        assert!(setup.witness.ended("a").await.is_completed());
        setup.assert_usable(&mcp).await;

        assert_eq!(events(&mcp, FIRST_EVENT).await, []);
    }
}

/// The answer repeats the event id sent by the client.
///
/// It does not matter which of the stream's events that is.
#[tokio::test]
async fn a_late_answer_repeats_the_id_that_the_client_named() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped).client().await;
    let mut call = setup.start_primed(&mcp, 1, "chatty", "a").await;
    let progress = call.event().await.expect("an event");
    assert_eq!(progress.id.as_deref(), Some("1/0"));
    call.fin();
    setup.events.detached(&mcp, 1).await;
    finish(&setup, &mcp, 1, "a").await;

    assert_eq!(events(&mcp, "1/0").await, delivered("1/0", "a"));
    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    assert_eq!(events(&mcp, "0/1").await, [], "another stream");
}

#[tokio::test]
async fn a_late_answer_is_for_its_own_session_only() {
    let setup = Plan::with_grace(Server::Wrapped).start().await;
    let (mcp, other_client) = (setup.mcp().await, setup.mcp().await);
    setup.cut(&mcp, 1, "a").await;
    finish(&setup, &mcp, 1, "a").await;

    assert_eq!(events(&other_client, FIRST_EVENT).await, []);
    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
}

/// The answer was written to a socket that its client no longer reads.
///
/// The server cannot know that.
#[tokio::test]
async fn an_answer_that_was_not_sent_to_any_client_is_retained() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped).client().await;
    complete_unread(&setup, &mcp).await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
}

/// rmcp removes the stream along with the answer, which may still be unread in a channel.
#[tokio::test]
async fn a_resume_that_arrives_before_the_answer_waits_for_it() {
    let _clock = StoppedClock::stop();
    let setup = Plan::with_grace(Server::Wrapped).inside(stalled);
    let (setup, mcp) = setup.client().await;
    let stalled = setup.start_primed(&mcp, 1, "hold", "a").await;
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    setup.assert_usable(&mcp).await;
    let (resumed, ()) = tokio::join!(events(&mcp, FIRST_EVENT), async {
        setup.assert_usable(&mcp).await;
        assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);
        stalled.rst();
    });

    assert_eq!(resumed, delivered(FIRST_EVENT, "a"));
}

#[tokio::test]
async fn detached_only_retains_only_answers_of_detached_calls() {
    let setup =
        Plan::with_grace(Server::Wrapped).layer(|layer| layer.retain(RetainAnswers::Detached));
    let (setup, mcp) = setup.client().await;
    complete_unread(&setup, &mcp).await;
    setup.cut(&mcp, 2, "b").await;
    finish(&setup, &mcp, 2, "b").await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, []);
    assert_eq!(events(&mcp, "0/1").await, delivered("0/1", "b"));
}

#[tokio::test]
async fn with_retain_off_only_cancels_are_retained() {
    let clock = StoppedClock::stop();
    let setup = Plan::with_grace(Server::Wrapped).layer(|layer| layer.retain(RetainAnswers::Off));
    let (setup, mcp) = setup.client().await;
    setup.cut(&mcp, 1, "a").await;
    finish(&setup, &mcp, 1, "a").await;
    setup.cut(&mcp, 2, "b").await;
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(&mcp, 2).await, ORPHANED);

    assert_eq!(events(&mcp, FIRST_EVENT).await, []);
    assert_eq!(
        events(&mcp, "0/1").await,
        [cancelled(json!(2), CancelReason::Orphaned)]
    );
}

/// How many bytes of answers a session may have retained in [`sharing`].
const SHARE: usize = 10_000;

fn sharing() -> Plan {
    let limits = Limits::default().retained(SHARE * 4);
    let limits = limits.retained_per_session(SHARE);
    Plan::with_grace(Server::Wrapped).layer(|layer| layer.limits(limits))
}

#[tokio::test]
async fn a_session_keeps_no_more_than_its_share() {
    let setup = sharing();
    let setup = setup.start().await;
    let (greedy, modest) = (setup.mcp().await, setup.mcp().await);
    setup.cut(&modest, 1, "modest").await;
    finish(&setup, &modest, 1, "modest").await;
    for (id, label) in [(1, "first"), (2, "second")] {
        leave_large(&setup, &greedy, id, label, SHARE * 6 / 10).await;
    }

    assert_eq!(events(&greedy, FIRST_EVENT).await, []);
    assert_eq!(events(&greedy, "0/1").await.len(), 2);
    let delivered = delivered(FIRST_EVENT, "modest");
    assert_eq!(events(&modest, FIRST_EVENT).await, delivered);
}

/// 24 answers of 1 MB exceed the limit for all sessions together.
#[tokio::test]
async fn delivered_answers_do_not_evict_undelivered_ones() {
    let setup = Plan::with_grace(Server::Wrapped).start().await;
    let away = setup.mcp().await;
    setup.cut(&away, 1, "away").await;
    finish(&setup, &away, 1, "away").await;

    for nth in 0..24 {
        let reader = setup.mcp().await;
        read_large(&setup, &reader, &format!("read {nth}"), 1_000_000).await;
    }

    let delivered = delivered(FIRST_EVENT, "away");
    assert_eq!(events(&away, FIRST_EVENT).await, delivered);
}

/// Answers in the same session are not evicted either.
#[tokio::test]
async fn an_answer_that_is_too_large_to_be_retained_does_not_evict_others() {
    let setup = sharing();
    let (setup, mcp) = setup.client().await;
    setup.cut(&mcp, 1, "a").await;
    finish(&setup, &mcp, 1, "a").await;

    read_large(&setup, &mcp, "read", SHARE).await;
    leave_large(&setup, &mcp, 3, "unread", SHARE).await;

    assert_eq!(events(&mcp, FIRST_EVENT).await, delivered(FIRST_EVENT, "a"));
    assert_eq!(events(&mcp, "0/2").await, []);
}

/// The eviction of an answer that has been read is not reported.
#[tokio::test]
async fn an_answer_that_is_evicted_before_its_client_resumes_is_reported() {
    let lines = Lines::up_to(Level::WARN);
    let setup = Plan::with_grace(Server::Wrapped).layer(|layer| {
        layer.limits(
            Limits::default()
                .retained(SHARE * 2)
                .retained_per_session(SHARE),
        )
    });
    let (setup, mcp) = setup.client().await;
    read_large(&setup, &mcp, "read", SHARE * 9 / 10).await;
    leave_large(&setup, &mcp, 2, "first", SHARE / 2).await;
    assert!(!setup.events.all().contains(&EVICTED));

    leave_large(&setup, &mcp, 3, "second", SHARE / 2).await;
    leave_large(&setup, &mcp, 4, "larger than all", SHARE).await;

    let reported = setup.events.all();
    let reported = reported.iter().filter(|kind| **kind == EVICTED).count();
    assert_eq!(reported, 2, "the first and the largest");
    assert_eq!(events(&mcp, "0/1").await, []);
    assert_eq!(events(&mcp, "0/2").await.len(), 2);
    let lines = lines.of_layer();
    assert_eq!(lines.len(), 1, "once a minute: {lines:#?}");
    let expected = "limit of retained answers reached: answers are evicted answers=1";
    assert!(lines[0].ends_with(expected), "{lines:#?}");
}

/// The answers of one tool are retained for an hour, like those of the README's example `approval`.
fn with_approvals() -> Plan {
    let plan = Plan::of(Server::Wrapped).grace(Grace::Auto);
    plan.layer(|layer| {
        layer.policy(|call| match call.tool() {
            Some("stubborn") => Policy::new().grace(Grace::After(RETENTION * 60)),
            _ => Policy::new(),
        })
    })
}

/// Three answers of this size fit into a session's default limit.
const LARGE: usize = 300_000;

/// When another answer needs space, all but the approval have expired.
#[tokio::test]
async fn expired_answers_make_room_before_one_that_has_not_expired() {
    let clock = StoppedClock::stop();
    let (setup, mcp) = with_approvals().client().await;
    leave(&setup, &mcp, 1, "stubborn", "approval", 0).await;
    for id in 2..5 {
        leave_large(&setup, &mcp, id, &format!("other {id}"), LARGE).await;
    }
    clock.advance(RETENTION * 3).await;

    leave_large(&setup, &mcp, 5, "last", LARGE).await;

    assert!(!setup.events.all().contains(&EVICTED));
    assert_eq!(events(&mcp, FIRST_EVENT).await.len(), 2);
    assert_eq!(events(&mcp, "0/4").await.len(), 2);
}

/// The other sessions' large answers, which would take nearly all the space, expired behind one approval each.
#[tokio::test]
async fn expired_answers_take_no_space_from_another_session() {
    let clock = StoppedClock::stop();
    let setup = with_approvals().start().await;
    for session in 0..16 {
        let mcp = setup.mcp().await;
        let label = format!("approval {session}");
        leave(&setup, &mcp, 1, "stubborn", &label, 0).await;
        let large = if session < 12 { 3 } else { 1 };
        for id in 2..2 + large {
            leave_large(&setup, &mcp, id, &format!("{session}-{id}"), LARGE).await;
        }
    }
    assert!(!setup.events.all().contains(&EVICTED), "there was room");
    clock.advance(RETENTION * 3).await;

    let mcp = setup.mcp().await;
    leave_large(&setup, &mcp, 1, "last", LARGE).await;

    assert!(!setup.events.all().contains(&EVICTED));
    assert_eq!(events(&mcp, FIRST_EVENT).await.len(), 2);
}

#[tokio::test]
async fn an_answer_expires_on_time_behind_one_that_is_retained_for_longer() {
    let clock = StoppedClock::stop();
    let (setup, mcp) = with_approvals().client().await;
    leave(&setup, &mcp, 1, "stubborn", "approval", 0).await;
    setup.cut(&mcp, 2, "a").await;
    finish(&setup, &mcp, 2, "a").await;

    clock.advance(RETENTION + TICK).await;

    assert_eq!(events(&mcp, "0/1").await, []);
    assert_eq!(events(&mcp, FIRST_EVENT).await.len(), 2);
}

async fn a_resume_of_an_orphan_gets_the_error_alone(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
    assert!(setup.witness.ended("a").await.is_cancelled());

    for wait in [Duration::ZERO, RETENTION - TICK * 2] {
        clock.advance(wait).await;
        assert_eq!(
            events(&mcp, FIRST_EVENT).await,
            [cancelled(json!(1), CancelReason::Orphaned)]
        );
    }

    clock.advance(TICK * 4).await;
    let late = events(&mcp, FIRST_EVENT).await;
    assert!(
        !late.contains(&cancelled(json!(1), CancelReason::Orphaned)),
        "the error is forgotten by then"
    );
}

async fn a_resume_of_a_call_that_its_client_cancelled_gets_the_error_alone(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    setup.cut(&mcp, 1, "a").await;
    assert_eq!(mcp.cancel(1).await, 202);
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::ClientCancelled);

    assert_eq!(
        events(&mcp, FIRST_EVENT).await,
        [cancelled(json!(1), CancelReason::ClientCancelled)]
    );
}

async fn the_error_of_a_cancelled_call_has_the_id_that_its_client_gave_it(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    for (stream, id) in [json!("7"), json!(7), json!("a \"quoted\" id\n")]
        .into_iter()
        .enumerate()
    {
        let label = format!("call {stream}");
        setup.cut(&mcp, id.clone(), &label).await;
        assert_eq!(mcp.cancel(id.clone()).await, 202);
        setup.events.ended(&mcp, id.clone()).await;

        let resumed = events(&mcp, &format!("0/{stream}")).await;

        assert_eq!(resumed, [cancelled(id, CancelReason::ClientCancelled)]);
    }
}

/// Both happen before the server's next step.
///
/// Whichever of them the server handles first, the call is not cancelled, and with the wrapper its answer can be
/// resumed.
async fn an_answer_that_coincides_with_the_disconnect_is_an_answer(server: Server) {
    for server_first in [false, true] {
        let (setup, mcp) = Plan::with_grace(server).client().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        call.head().await;

        if server_first {
            setup.witness.release("a");
            call.rst();
        } else {
            call.rst();
            setup.witness.release("a");
        }

        assert!(setup.witness.ended("a").await.is_completed());
        setup.exchanges.over_for("a").await;
        assert!(!setup.tokens.of("a").is_cancelled());
        if server == Server::Wrapped {
            let outcome = setup.events.ended(&mcp, 1).await;
            assert_eq!(outcome, Outcome::Completed);
            let resumed = events(&mcp, FIRST_EVENT).await;
            assert_eq!(resumed, delivered(FIRST_EVENT, "a"));
        }
    }
}

/// Starts call 1, labelled "a", and makes the server end its stream.
async fn end_stream(setup: &Setup, mcp: &Mcp) {
    let mut call = setup.start_call(mcp, 1, "hold", "a").await;
    setup.sessions.end_stream(mcp, 0, None).await;
    call.body_to_end().await;
    setup.events.detached(mcp, 1).await;
}

/// Lets the handler return and waits until the call has completed.
async fn finish(setup: &Setup, mcp: &Mcp, id: u64, label: &str) {
    setup.witness.release(label);
    assert_eq!(setup.events.ended(mcp, id).await, Outcome::Completed);
    assert!(setup.calls.is_empty());
}

/// Completes a call whose answer has `bytes` bytes after its client has disconnected.
async fn leave_large(setup: &Setup, mcp: &Mcp, id: u64, label: &str, bytes: usize) {
    leave(setup, mcp, id, "hold", label, bytes).await;
}

/// Completes a call to `tool` after its client has disconnected. `padding` bytes are added to its answer.
async fn leave(setup: &Setup, mcp: &Mcp, id: u64, tool: &str, label: &str, padding: usize) {
    let arguments = json!({ "label": label, "padding": padding });
    let mut call = mcp.call(id, tool, arguments).await;
    setup.witness.started(label).await;
    call.head().await;
    call.fin();
    setup.events.detached(mcp, id).await;
    finish(setup, mcp, id, label).await;
}

/// Reads an answer of `bytes` bytes with a connected client.
async fn read_large(setup: &Setup, mcp: &Mcp, label: &str, bytes: usize) {
    let arguments = json!({ "label": label, "padding": bytes });
    let mut call = mcp.call(label, "hold", arguments).await;
    setup.witness.release(label);
    let answer = call.answer().await.expect("the answer");
    let text = answer["result"]["content"][0]["text"].as_str();
    assert_eq!(
        text.map(str::len),
        Some("done:".len() + label.len() + bytes)
    );
    setup.events.ended(mcp, label).await;
}

/// Completes call 1 on an open connection that its client never reads from.
async fn complete_unread(setup: &Setup, mcp: &Mcp) {
    let call = mcp.call(1, "hold", arguments("a")).await;
    setup.witness.started("a").await;
    finish(setup, mcp, 1, "a").await;
    call.rst();
    let expected = [EventKind::Started, EventKind::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(mcp, 1), expected);
}

/// Returns all events that a resume delivers, with the keys of their messages sorted.
///
/// The stream must end on its own.
async fn events(mcp: &Mcp, last_event_id: &str) -> Vec<SseEvent> {
    let mut resumed = mcp.resume(last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    let mut events = Vec::new();
    while let Some(mut event) = resumed.event().await {
        if !event.is_priming() {
            event.data = event.json().to_string();
        }
        events.push(event);
    }
    assert!(resumed.is_complete(), "the stream has ended properly");
    events
}

/// Returns the events that deliver a retained answer from `hold`.
///
/// They are the repeated id, followed by the answer without an id.
fn delivered(last_event_id: &str, label: &str) -> Vec<SseEvent> {
    let content = json!([{ "type": "text", "text": format!("done:{label}") }]);
    let id = match last_event_id.split_once('/') {
        Some((_, stream)) => stream.parse::<u64>().expect("a stream") + 1,
        None => panic!("not an event id from a call's stream"),
    };
    let answer = json!({
        "jsonrpc": "2.0",
        "id": id,
        "result": { "content": content, "isError": false },
    });
    vec![
        SseEvent {
            id: Some(last_event_id.to_owned()),
            retry: Some(3_000),
            ..SseEvent::default()
        },
        message(&answer),
    ]
}

fn cancelled(id: Value, reason: CancelReason) -> SseEvent {
    let text = format!("Request cancelled: {reason}");
    let error = json!({ "code": -32_800, "message": text });
    message(&json!({ "jsonrpc": "2.0", "id": id, "error": error }))
}

fn message(message: &Value) -> SseEvent {
    SseEvent {
        data: message.to_string(),
        ..SseEvent::default()
    }
}
