//! `CallToken::on_cancel`, whose clean-ups run only after a cancellation.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason, CancelReason::ClientDisconnected,
    body::ResponseBody,
};
use tokio::sync::mpsc;

use super::{
    exchange::{Kind, exchange, immediate, respond},
    script::{Script, Scripted, Step},
};
use crate::support::within;

type Body = Response<ResponseBody<Scripted>>;

/// The reasons passed to a clean-up that has run.
type Ran = mpsc::UnboundedReceiver<CancelReason>;

/// The answer to a [`Kind`]'s call, as an event.
const ANSWER: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n";

/// A value whose destructor can be observed through the other `Arc`.
struct Owned(#[expect(dead_code, reason = "only exists to be dropped")] Arc<()>);

fn in_flight(layer: &CancelOnDisconnectLayer, kind: Kind) -> (Body, CallToken) {
    exchange(layer, kind.request(), &Script::stalled())
}

/// Registers a clean-up that reports the reason it ran with.
fn register_reporting(token: &CallToken) -> Ran {
    let (sender, ran) = mpsc::unbounded_channel();
    token.on_cancel(async move |reason| sender.send(reason).expect("the test is listening"));
    ran
}

async fn ran(clean_up: &mut Ran) -> CancelReason {
    let reason = within("the clean-up to run", clean_up.recv()).await;
    reason.expect("the clean-up was not dropped before it ran")
}

/// Asserts that the clean-up has been dropped without having run (again).
async fn assert_dropped(mut clean_up: Ran, kind: Kind) {
    let received = within("the clean-up to be dropped", clean_up.recv()).await;
    assert_eq!(received, None, "{kind:?}");
}

/// Registers a clean-up that owns a value.
///
/// Returns a function that is `true` for as long as the clean-up owns it.
fn register_owning(token: &CallToken) -> impl Fn() -> bool + use<> {
    let shared = Arc::new(());
    let owned = Owned(shared.clone());
    token.on_cancel(async move |_| drop(owned));
    move || Arc::strong_count(&shared) > 1
}

#[tokio::test]
async fn a_clean_up_runs_once_after_a_disconnect() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let (response, token) = in_flight(&layer, kind);
        let mut clean_up = register_reporting(&token);
        drop(response);
        assert_eq!(ran(&mut clean_up).await, ClientDisconnected, "{kind:?}");
        assert_dropped(clean_up, kind).await;
    }
}

#[tokio::test]
async fn a_clean_up_may_be_a_closure_that_returns_a_future() {
    let (layer, _log) = immediate();
    let (response, token) = in_flight(&layer, Kind::Plain);
    let (sender, mut clean_up) = mpsc::unbounded_channel();
    token.on_cancel(|reason| async move { sender.send(reason).expect("the test is listening") });
    drop(response);
    assert_eq!(ran(&mut clean_up).await, ClientDisconnected);
}

/// The closure does not run there either, since it might do work before it returns a future.
#[tokio::test]
async fn a_clean_up_does_not_run_inside_the_drop_of_the_response() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let (response, token) = in_flight(&layer, kind);
        let (sender, mut clean_up) = mpsc::unbounded_channel();
        let early = Arc::new(AtomicBool::new(false));
        let started = early.clone();
        token.on_cancel(move |reason| {
            started.store(true, Ordering::Relaxed);
            async move { sender.send(reason).expect("the test is listening") }
        });
        drop(response);
        assert!(!early.load(Ordering::Relaxed), "{kind:?}");
        ran(&mut clean_up).await;
    }
}

#[tokio::test]
async fn a_clean_up_that_panics_does_not_affect_the_others() {
    let (layer, _log) = immediate();
    let (response, token) = in_flight(&layer, Kind::Session);
    let mut first = register_reporting(&token);
    token.on_cancel(async |_| panic!("the clean-up panics on purpose"));
    token.on_cancel(|_| -> std::future::Ready<()> { panic!("and its closure panics, too") });
    let mut last = register_reporting(&token);
    drop(response);
    assert_eq!(ran(&mut first).await, ClientDisconnected);
    assert_eq!(ran(&mut last).await, ClientDisconnected);
    token.cancelled().await;
}

#[tokio::test]
async fn a_clean_up_that_waits_does_not_delay_the_others() {
    let (layer, _log) = immediate();
    let (response, token) = in_flight(&layer, Kind::Plain);
    token.on_cancel(async |_| std::future::pending().await);
    let mut other = register_reporting(&token);
    drop(response);
    ran(&mut other).await;
}

#[tokio::test]
async fn a_clean_up_that_is_added_after_the_cancel_runs_at_once() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let (response, token) = in_flight(&layer, kind);
        drop(response);
        let mut late = register_reporting(&token);
        assert_eq!(ran(&mut late).await, ClientDisconnected, "{kind:?}");
    }
}

/// A clean-up can call any method, because no lock is held.
#[tokio::test]
async fn a_clean_up_may_register_another() {
    let (layer, _log) = immediate();
    let (response, token) = in_flight(&layer, Kind::Session);
    let (sender, mut clean_up) = mpsc::unbounded_channel();
    let again = token.clone();
    token.on_cancel(async move |_| {
        again.on_cancel(async move |reason| sender.send(reason).expect("the test is listening"));
    });
    drop(response);
    assert_eq!(ran(&mut clean_up).await, ClientDisconnected);
}

#[tokio::test]
async fn a_completed_call_drops_its_clean_ups_unrun() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let answered = Script::new([Step::data(ANSWER)]);
        let (response, token) = exchange(&layer, kind.request(), &answered);
        let (owns, clean_up) = (register_owning(&token), register_reporting(&token));
        assert!(owns(), "{kind:?}");
        let body = response.into_body().collect().await.expect("a body");
        assert_eq!(body.to_bytes(), ANSWER);
        // The token still exists, so it is not what dropped the clean-ups.
        assert!(!owns(), "{kind:?}");
        assert_dropped(clean_up, kind).await;
        assert!(!token.is_cancelled(), "{kind:?}");
    }
}

/// Once the answer has been sent, the rest of the stream does not matter.
#[tokio::test]
async fn a_disconnect_after_the_answer_does_not_cause_a_clean_up() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, _log) = immediate();
        let answered = Script::new([
            Step::data(ANSWER),
            Step::Wait,
            Step::data(": still open\n\n"),
        ]);
        let (response, token) = exchange(&layer, kind.request(), &answered);
        let clean_up = register_reporting(&token);
        let mut body = response.into_body();
        body.frame().await.expect("a frame").expect("the answer");
        drop(body);
        assert_dropped(clean_up, kind).await;
    }
}

#[tokio::test]
async fn an_answer_in_one_piece_and_a_refusal_do_not_cause_a_clean_up() {
    let json = |_: &_| {
        let response = Response::builder().header(header::CONTENT_TYPE, "application/json");
        let body = Script::whole(Bytes::from("{}")).body();
        response.body(body).expect("a response")
    };
    let refused = |_: &_| {
        let response = Response::builder().status(StatusCode::FORBIDDEN);
        response
            .body(Script::whole(Bytes::from("no")).body())
            .expect("a response")
    };
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        for (response, token) in [
            respond(&layer, kind.request(), json),
            respond(&layer, kind.request(), refused),
        ] {
            let clean_up = register_reporting(&token);
            let whole = response.into_body().collect().await;
            whole.expect("a body");
            assert_dropped(clean_up, kind).await;
        }
    }
}

#[tokio::test]
async fn a_clean_up_that_is_added_after_the_end_never_runs() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let answered = Script::new([Step::data(ANSWER)]);
        let (response, token) = exchange(&layer, kind.request(), &answered);
        response.into_body().collect().await.expect("a body");
        let (owns, clean_up) = (register_owning(&token), register_reporting(&token));
        assert!(!owns(), "{kind:?}");
        assert_dropped(clean_up, kind).await;
    }
}

#[test]
fn clean_ups_are_dropped_where_there_never_was_a_runtime() {
    let (layer, _log) = immediate();
    let (response, token) = in_flight(&layer, Kind::Plain);
    let mut clean_up = register_reporting(&token);
    drop(response);
    assert_eq!(token.reason(), Some(ClientDisconnected));
    assert_eq!(
        clean_up.try_recv(),
        Err(mpsc::error::TryRecvError::Disconnected)
    );
}

/// A value that a clean-up owns may panic in its destructor.
///
/// This must not affect the server that dropped the response.
#[tokio::test]
async fn a_panic_in_a_destructor_is_contained() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("the destructor panics on purpose");
        }
    }
    let (layer, _log) = immediate();
    let answered = Script::new([Step::data(ANSWER)]);
    let (response, token) = exchange(&layer, Kind::Session.request(), &answered);
    let bomb = Bomb;
    token.on_cancel(async move |_| drop(bomb));
    let owns = register_owning(&token);
    response.into_body().collect().await.expect("a body");
    assert!(!owns());
}

#[tokio::test]
async fn a_token_that_is_kept_keeps_neither_the_request_nor_the_service_after_the_end() {
    let answered = || Script::new([Step::data(ANSWER)]);
    for (script, how) in [(answered(), "answered"), (Script::stalled(), "hung up")] {
        let (layer, _log) = immediate();
        let secret = Arc::new(());
        let mut request = Kind::Session.request();
        request.extensions_mut().insert(secret.clone());
        let (response, token) = exchange(&layer, request, &script);
        assert_eq!(
            Arc::strong_count(&secret),
            2,
            "{how}: kept for sending a cancel"
        );
        match how {
            "answered" => drop(response.into_body().collect().await),
            _ => drop(response),
        }
        let freed = async {
            while Arc::strong_count(&secret) > 1 {
                tokio::task::yield_now().await;
            }
        };
        within("the request to be freed", freed).await;
        assert_eq!(token.is_cancelled(), how == "hung up");
    }
}
