//! `CallToken::answered`, at every point of an exchange.
//!
//! A service inside the layer has received the answer.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, Barrier},
    task::Poll,
    thread,
};

use http::{Method, Response};
use http_body_util::{BodyExt as _, Full};
use mcp_cancel_on_disconnect::{
    CallToken,
    CancelReason::{ClientDisconnected, Orphaned},
    Grace, Outcome,
};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{
    exchange::{
        Answer, InnerRequest, Kind, Tokens, bodyless, exchange, immediate, poll_once, respond,
        sent, stalled,
    },
    script::{Script, Step},
};
use crate::{
    foreign::Foreign,
    log::{Happened, number},
    setup::{GRACE, StoppedClock},
    support::within,
};

const NAMED: &str = "id: x-1\ndata: \n\n";

/// Returns how many calls have started, and the outcomes of those that have ended.
fn calls(log: &crate::log::Log) -> (usize, Vec<Outcome>) {
    (log.started(), log.ends(&number(7)))
}

#[test]
fn a_call_that_is_answered_before_its_head_completes() {
    for kind in Kind::ALL {
        let (layer, log, tokens, mut response) = sent(kind, |_| pending::<Answer<Infallible>>());
        assert!(poll_once(response.as_mut()).is_pending());

        tokens.latest().answered();

        assert!(layer.calls().is_empty(), "{kind:?}");
        drop(response);
        assert_eq!(tokens.latest().reason(), None, "{kind:?}");
        if kind.is_call() {
            assert_eq!(calls(&log), (1, vec![Outcome::Completed]), "{kind:?}");
        }
    }
}

/// The future is not polled between the end of the body and the answer.
///
/// This is what happens if a single task in a gateway reads both.
#[test]
fn a_call_that_is_answered_before_its_body_was_read_is_counted_and_never_in_flight() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, log, tokens, mut response) = sent(kind, |tokens| {
            tokens.latest().answered();
            pending::<Answer<Infallible>>()
        });

        assert!(poll_once(response.as_mut()).is_pending());

        assert!(layer.calls().is_empty(), "{kind:?}");
        assert_eq!(calls(&log), (1, vec![Outcome::Completed]), "{kind:?}");
        drop(response);
        assert_eq!(tokens.latest().reason(), None, "{kind:?}");
        assert_eq!(calls(&log), (1, vec![Outcome::Completed]), "{kind:?}");
    }
}

#[test]
fn a_disconnect_from_a_request_that_was_answered_before_its_body_has_no_effect() {
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let tokens = Tokens::default();
        let recording = tokens.clone();
        let service = layer.layer(service_fn(move |request: InnerRequest| {
            recording.record(&request);
            recording.latest().answered();
            async move {
                // This happens only after the client has disconnected.
                tokio::task::yield_now().await;
                let Ok(_whole) = request.into_body().collect().await;
                pending::<Answer<Infallible>>().await
            }
        }));
        let mut response = Box::pin(service.oneshot(kind.request()));
        assert!(poll_once(response.as_mut()).is_pending());
        drop(response);
        assert_eq!(tokens.latest().reason(), None, "{kind:?}");
        assert_eq!(log.cancelled(), [], "{kind:?}");
        assert_eq!(calls(&log), (0, Vec::new()), "{kind:?}");
    }
}

#[test]
fn a_call_that_is_answered_while_its_stream_runs_completes() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, log) = immediate();
        let script = Script::new([Step::data(NAMED), Step::data("data: half")]);
        let (mut response, token) = exchange(&layer, kind.request(), &script);
        assert_eq!(layer.calls().len(), 1);
        let frame = poll_once(Box::pin(response.body_mut().frame()).as_mut());
        assert!(matches!(frame, Poll::Ready(Some(Ok(_)))));

        token.answered();
        token.answered();

        assert!(layer.calls().is_empty(), "{kind:?}");
        // The rest of the body is passed on.
        let frame = poll_once(Box::pin(response.body_mut().frame()).as_mut());
        assert!(matches!(frame, Poll::Ready(Some(Ok(_)))));
        drop(response);
        assert_eq!(token.reason(), None, "{kind:?}");
        assert_eq!(calls(&log), (1, vec![Outcome::Completed]), "{kind:?}");
    }
}

#[test]
fn a_later_head_changes_nothing() {
    for status in [200, 202, 401, 500] {
        let (layer, log) = immediate();
        let (response, token) = respond(&layer, Kind::Session.request(), move |tokens| {
            tokens.latest().answered();
            let response = Response::builder().status(status);
            response
                .body(Script::whole("{}").body())
                .expect("a response")
        });
        assert_eq!(response.status(), status);
        drop(response);
        assert_eq!(token.reason(), None);
        assert_eq!(calls(&log), (1, vec![Outcome::Completed]), "{status}");
    }
}

#[test]
fn a_cancel_before_the_answer_stays_a_cancel() {
    for kind in Kind::ALL {
        let (_layer, log, response, token) = stalled(kind);
        drop(response);
        token.answered();
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        if kind.is_call() {
            let end = vec![Outcome::Cancelled(ClientDisconnected)];
            assert_eq!(calls(&log), (1, end), "{kind:?}");
        }
    }
}

#[test]
fn answered_on_a_request_without_a_call_only_disables_its_token() {
    let initialize = r#"{"jsonrpc":"2.0","id":7,"method":"initialize","params":{}}"#;
    let bodies = [initialize, "{", "[]"];
    let bodies = bodies.map(|body| Kind::Stateless.request_with(Full::from(body)));
    let without = [Method::GET, Method::PUT].map(bodyless);
    for request in without.into_iter().chain(bodies) {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, request, &Script::stalled());
        token.answered();
        drop(response);
        assert_eq!(token.reason(), None);
        assert_eq!(calls(&log), (0, Vec::new()));
    }
}

#[tokio::test]
async fn clean_ups_of_an_answered_request_are_dropped_at_once() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let owned = Arc::new(());
        for _ in 0..2 {
            let owned = owned.clone();
            token.on_cancel(async move |_| drop(owned));
        }
        token.answered();
        assert_eq!(Arc::strong_count(&owned), 1, "{kind:?}");
        drop(response);
    }
}

#[tokio::test]
async fn a_detached_call_that_is_answered_is_not_cancelled_when_its_grace_ends() {
    let clock = StoppedClock::stop();
    let foreign = Foreign::with(Grace::After(GRACE));
    let token = cut(&foreign).await;
    clock.advance(GRACE / 2).await;

    token.answered();

    assert_eq!(foreign.log.ends(&number(1)), [Outcome::Completed]);
    clock.advance_past(GRACE).await;
    assert_eq!(foreign.cancels(), 0);
    assert_eq!(token.reason(), None);
    assert!(foreign.layer.calls().is_empty());
}

#[tokio::test]
async fn a_late_resume_of_an_answered_call_passes_untouched() {
    let clock = StoppedClock::stop();
    let foreign = Foreign::with(Grace::After(GRACE));
    let token = cut(&foreign).await;
    token.answered();
    clock.advance_past(GRACE * 2).await;

    let mut late = foreign.resume("x-1").await;

    let answer = "id: x-2\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n";
    foreign.send_event_to_newest(answer);
    let frame = late
        .frame()
        .await
        .expect("a frame")
        .expect("the body does not fail");
    assert_eq!(frame.into_data().expect("data"), answer);
    foreign.end_newest();
    assert!(late.frame().await.is_none());
    assert_eq!(foreign.cancels(), 0);
    let resumed = |event: &Happened| matches!(event, Happened::Other(_));
    assert!(!foreign.log.events().iter().any(resumed));
}

#[tokio::test]
async fn the_resume_of_a_call_that_is_answered_meanwhile_passes() {
    let clock = StoppedClock::stop();
    let foreign = Foreign::with(Grace::After(GRACE));
    let token = cut(&foreign).await;
    let answered = token.clone();
    foreign.on_next_request(move || answered.answered());
    clock.advance(GRACE / 2).await;

    let mut resumed = foreign.resume("x-1").await;
    foreign.send_event_to_newest("data: 1\n\n");
    Foreign::frame(&mut resumed).await;
    drop(resumed);

    clock.advance_past(GRACE).await;
    assert_eq!(foreign.cancels(), 0);
    assert_eq!(foreign.log.ends(&number(1)), [Outcome::Completed]);
}

#[tokio::test]
async fn a_call_whose_grace_has_ended_stays_cancelled_and_its_client_gets_the_error() {
    let clock = StoppedClock::stop();
    let foreign = Foreign::with(Grace::After(GRACE));
    let token = cut(&foreign).await;
    clock.advance_past(GRACE).await;

    token.answered();

    within("the token to fire", token.cancelled()).await;
    assert_eq!(foreign.log.ends(&number(1)), [Outcome::Cancelled(Orphaned)]);
    let received = foreign.resume("x-1").await.collect().await;
    let received = received.expect("the body does not fail").to_bytes();
    assert!(
        received.windows(6).any(|text| text == b"-32800"),
        "{received:?}"
    );
}

#[tokio::test]
async fn after_the_answer_a_cancel_by_the_client_passes_and_fires_nothing() {
    let foreign = Foreign::with(Grace::After(GRACE));
    let call = foreign.call(1).await;
    let token = foreign.token();
    token.answered();

    foreign.cancel(1).await;

    assert_eq!(foreign.cancels(), 1, "the server receives the cancel");
    assert_eq!(token.reason(), None);
    assert_eq!(foreign.log.ends(&number(1)), [Outcome::Completed]);
    drop(call);
}

#[test]
fn an_answer_and_a_simultaneous_disconnect_have_one_outcome() {
    for round in 0..1_000 {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, Kind::Session.request(), &Script::stalled());
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                token.answered();
            });
            barrier.wait();
            drop(response);
        });
        let (_, ends) = calls(&log);
        let expected = match token.reason() {
            Some(reason) => Outcome::Cancelled(reason),
            None => Outcome::Completed,
        };
        assert_eq!(ends, [expected], "round {round}");
        assert!(layer.calls().is_empty());
    }
}

/// Starts a call with an event id and disconnects its client.
async fn cut(foreign: &Foreign) -> CallToken {
    let mut call = foreign.call(1).await;
    foreign.send_event(NAMED);
    Foreign::frame(&mut call).await;
    drop(call);
    foreign.token()
}
