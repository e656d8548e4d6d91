//! Exchanges dropped without a runtime or on another one, and runtimes that stall.

use std::{convert::Infallible, future::pending, sync::mpsc as blocking, thread, time::Duration};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer,
    CancelReason::{self, ClientDisconnected, Orphaned, TimedOut},
    Grace,
    body::ResponseBody,
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc,
    time::Instant,
};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

use super::{
    exchange::{
        Answer, InnerRequest, Kind, Tokens, assert_cancelled, event_stream, exchange, immediate,
        poll_once, reading,
    },
    script::{End, Script, Scripted, Step},
};
use crate::{
    log::{Happened, Log, number},
    setup::paused_runtime,
    support::within,
};

const HOUR: Duration = Duration::from_secs(60 * 60);

fn with_grace() -> (CancelOnDisconnectLayer, Log) {
    Log::of(CancelOnDisconnectLayer::new().grace(Grace::After(HOUR)))
}

/// Returns the body and the token of a call in flight. The timer starts on the current runtime, if any.
fn in_flight(
    layer: &CancelOnDisconnectLayer,
    kind: Kind,
) -> (Response<ResponseBody<Scripted>>, CallToken) {
    exchange(layer, kind.request(), &Script::stalled())
}

/// Returns a service that keeps its calls open, and the messages that are replayed to it.
fn with_replays() -> (
    impl Service<InnerRequest, Response = Response<Scripted>, Error = Infallible, Future: Send>
    + Clone
    + Send,
    mpsc::UnboundedReceiver<Bytes>,
) {
    let (replayed, replays) = mpsc::unbounded_channel();
    let service = service_fn(move |request: InnerRequest| {
        let replayed = replayed.clone();
        async move {
            let token = request.extensions().get::<CallToken>();
            let is_replay = token.is_none_or(CallToken::is_replay);
            let Ok(body) = request.into_body().collect().await;
            if is_replay {
                replayed
                    .send(body.to_bytes())
                    .expect("the test is listening");
            }
            Ok(event_stream(Script::stalled().body()))
        }
    });
    (service, replays)
}

async fn orphaned(token: &CallToken) {
    cancelled(token, Orphaned).await;
}

async fn cancelled(token: &CallToken, reason: CancelReason) {
    within("the deadline to fire", token.cancelled()).await;
    assert_eq!(token.reason(), Some(reason));
}

/// Registers a runtime with the layer, as any request would.
fn register(runtime: &Runtime, layer: &CancelOnDisconnectLayer) {
    runtime.block_on(async { drop(in_flight(layer, Kind::Plain)) });
}

/// Shuts down a runtime that holds a response.
fn shut_down_with(runtime: Runtime, response: impl Send + 'static) {
    runtime.spawn(async move {
        let _response = response;
        pending::<()>().await;
    });
    runtime.block_on(tokio::task::yield_now());
}

/// Waits for a replay, which must be a cancellation for the call.
fn assert_replayed(runtime: &Runtime, replays: &mut mpsc::UnboundedReceiver<Bytes>) {
    let replay = runtime.block_on(within("the replay to arrive", replays.recv()));
    let replay = replay.expect("the service is alive");
    let message: serde_json::Value = serde_json::from_slice(&replay).expect("JSON");
    assert_eq!(message["method"], "notifications/cancelled");
    assert_eq!(message["params"]["requestId"], 7);
}

#[test]
fn a_token_fires_where_there_never_was_a_runtime() {
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = in_flight(&layer, kind);
        drop(response);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        let failed = |event: &Happened| matches!(event, Happened::CancelFailed(_, None));
        // The replay cannot run without a runtime, which is reported.
        let has_replay = kind == Kind::Session;
        assert_eq!(log.events().iter().any(failed), has_replay, "{kind:?}");
    }
}

#[test]
fn a_grace_may_begin_where_there_never_was_a_runtime() {
    let (layer, _log) = with_grace();
    let (response, token) = in_flight(&layer, Kind::Session);
    drop(response);
    assert_eq!(token.reason(), None);
    assert_eq!(layer.calls().len(), 1);
    paused_runtime().block_on(async {
        // Every request registers its runtime.
        drop(in_flight(&layer, Kind::Plain));
        orphaned(&token).await;
    });
    assert!(layer.calls().is_empty());
}

#[test]
fn a_call_dropped_on_a_thread_without_a_runtime_is_cancelled_on_its_own() {
    let (layer, _log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let response = runtime.block_on(service.oneshot(Kind::Session.request()));
    thread::spawn(move || drop(response))
        .join()
        .expect("a drop never panics");
    assert_replayed(&runtime, &mut replays);
}

#[test]
fn a_runtime_that_shuts_down_cancels_the_calls_whose_bodies_it_held() {
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let runtime = paused_runtime();
        let (response, token) = runtime.block_on(async { in_flight(&layer, kind) });
        let mut body = response.into_body();
        runtime.spawn(async move { body.frame().await.is_some() });
        runtime.block_on(tokio::task::yield_now());
        assert_eq!(token.reason(), None, "{kind:?}");
        drop(runtime);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        assert_cancelled(&log, kind, ClientDisconnected);
    }
}

#[test]
fn a_runtime_that_shuts_down_cancels_the_calls_that_have_no_head_yet() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let tokens = Tokens::default();
        let service = layer.layer(reading(&tokens, |_| pending::<Answer<Infallible>>()));
        let runtime = paused_runtime();
        runtime.spawn(async move { service.oneshot(kind.request()).await.is_ok() });
        runtime.block_on(tokio::task::yield_now());
        let token = tokens.latest();
        assert_eq!(token.reason(), None, "{kind:?}");
        drop(runtime);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
    }
}

#[test]
fn a_grace_that_began_while_a_runtime_shut_down_ends_on_the_next_one() {
    let (layer, log) = with_grace();
    let runtime = paused_runtime();
    let (response, token) = runtime.block_on(async { in_flight(&layer, Kind::Session) });
    shut_down_with(runtime, response);
    assert_eq!(token.reason(), None);
    assert!(matches!(log.events().last(), Some(Happened::Detached(_))));
    paused_runtime().block_on(async {
        drop(in_flight(&layer, Kind::Plain));
        orphaned(&token).await;
    });
}

#[test]
fn a_grace_ends_on_the_second_runtime_of_a_layer() {
    let (layer, _log) = with_grace();
    let first = paused_runtime();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    drop(first);
    paused_runtime().block_on(async {
        let (response, token) = in_flight(&layer, Kind::Session);
        drop(response);
        orphaned(&token).await;
    });
    assert!(layer.calls().is_empty());
}

#[test]
fn a_grace_ends_on_a_runtime_that_outlives_the_first_one_of_the_layer() {
    let (layer, _log) = with_grace();
    let first = paused_runtime();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    let second = paused_runtime();
    let (response, token) = second.block_on(async { in_flight(&layer, Kind::Session) });
    drop(first);
    second.block_on(async {
        drop(response);
        orphaned(&token).await;
    });
}

#[test]
fn a_cancel_reaches_the_server_when_the_first_runtime_of_the_layer_has_ended() {
    let (layer, _log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let first = paused_runtime();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    let second = paused_runtime();
    let response = second.block_on(service.oneshot(Kind::Session.request()));
    drop(first);
    second.block_on(async {
        drop(response);
        let replay = within("the replay to arrive", replays.recv()).await;
        assert!(replay.is_some());
    });
}

#[test]
fn a_future_polled_on_one_thread_may_be_dropped_on_another() {
    let (layer, _log) = immediate();
    let tokens = Tokens::default();
    let service = layer.layer(reading(&tokens, |_| pending::<Answer<Infallible>>()));
    let mut response = Box::pin(service.oneshot(Kind::Stateless.request()));
    assert!(poll_once(response.as_mut()).is_pending());
    thread::spawn(move || drop(response))
        .join()
        .expect("a drop never panics");
    assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
}

#[test]
fn a_cancel_reaches_the_server_while_the_first_runtime_of_the_layer_is_not_driven() {
    let (layer, _log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let first = paused_runtime();
    register(&first, &layer);
    let second = paused_runtime();
    let response = second.block_on(service.oneshot(Kind::Session.request()));
    second.block_on(async { drop(response) });
    assert_replayed(&second, &mut replays);
}

/// The runtime's last `block_on` drops the response.
#[test]
fn a_cancel_reaches_the_server_though_the_runtime_of_the_disconnect_is_no_longer_driven() {
    let (layer, _log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let first = paused_runtime();
    let second = paused_runtime();
    let response = first.block_on(service.oneshot(Kind::Session.request()));
    register(&second, &layer);
    first.block_on(async { drop(response) });
    assert_replayed(&second, &mut replays);
}

#[test]
fn a_clean_up_runs_though_the_runtime_of_the_disconnect_is_no_longer_driven() {
    let (layer, _log) = immediate();
    let first = paused_runtime();
    let second = paused_runtime();
    let (response, token) = first.block_on(async { in_flight(&layer, Kind::Plain) });
    register(&second, &layer);
    let (sender, mut ran) = mpsc::unbounded_channel();
    token.on_cancel(async move |reason| sender.send(reason).expect("the test is listening"));
    first.block_on(async { drop(response) });
    let reason = second.block_on(within("the clean-up to run", ran.recv()));
    assert_eq!(reason, Some(ClientDisconnected));
}

#[test]
fn a_grace_ends_though_the_runtime_on_which_it_began_is_no_longer_driven() {
    let (layer, _log) = with_grace();
    let first = paused_runtime();
    let token = first.block_on(async {
        let (response, token) = in_flight(&layer, Kind::Session);
        drop(response);
        // Let the timer pick up the deadline.
        tokio::task::yield_now().await;
        token
    });
    paused_runtime().block_on(async {
        let started = Instant::now();
        drop(in_flight(&layer, Kind::Plain));
        orphaned(&token).await;
        // The client could be waiting on the stalled runtime, so the deadline is postponed, but only once.
        let ended = started.elapsed().as_secs();
        assert!((3600 + 5..3600 + 6).contains(&ended), "{ended} s");
    });
    drop(first);
}

#[test]
fn a_grace_ends_in_time_on_its_runtime_whichever_runtime_registered_first() {
    let (layer, _log) = with_grace();
    let first = paused_runtime();
    register(&first, &layer);
    paused_runtime().block_on(async {
        let (response, token) = in_flight(&layer, Kind::Session);
        let started = Instant::now();
        drop(response);
        orphaned(&token).await;
        assert_eq!(started.elapsed().as_secs(), 3600);
    });
    drop(first);
}

#[test]
fn a_call_times_out_though_its_runtime_is_no_longer_driven() {
    let layer = CancelOnDisconnectLayer::new().call_timeout(HOUR);
    let first = paused_runtime();
    let (response, token) = first.block_on(async {
        let in_flight = in_flight(&layer, Kind::Session);
        tokio::task::yield_now().await;
        in_flight
    });
    paused_runtime().block_on(async {
        let started = Instant::now();
        drop(exchange(&layer, Kind::Plain.request(), &Script::stalled()));
        cancelled(&token, TimedOut).await;
        assert_eq!(started.elapsed().as_secs(), 3600);
    });
    drop((response, first));
}

#[test]
fn an_unread_stream_is_closed_though_its_runtime_is_no_longer_driven() {
    let layer = immediate().0.stall_timeout(HOUR);
    let first = paused_runtime();
    let (body, token) = first.block_on(async {
        let one_event = Script::new([Step::data("data: 1\n\n")]).end(End::Silent);
        let (response, token) = exchange(&layer, Kind::Session.request(), &one_event);
        let mut body = response.into_body();
        body.frame().await.expect("a frame").expect("data");
        (body, token)
    });
    paused_runtime().block_on(async {
        let started = Instant::now();
        drop(in_flight(&layer, Kind::Plain));
        cancelled(&token, ClientDisconnected).await;
        // The reader could be on the stalled runtime, so it is given the same time once more.
        let hours = started.elapsed().as_secs() / 3600;
        assert!(hours <= 2, "{hours} h");
    });
    drop((body, first));
}

#[test]
fn deadlines_are_met_while_the_thread_of_the_first_runtime_is_busy() {
    let (layer, _log) = with_grace();
    let (computes, computing) = blocking::channel();
    let (end, ended) = blocking::channel::<()>();
    let first = layer.clone();
    let thread = thread::spawn(move || {
        paused_runtime().block_on(async {
            // This deadline is the earliest, so it is this runtime's timer that is waiting.
            let hung_up = in_flight(&first.grace(Grace::After(HOUR / 2)), Kind::Session);
            drop(hung_up);
            tokio::task::yield_now().await;
            computes.send(()).expect("the test is listening");
            let (Ok(()) | Err(_)) = ended.recv();
        });
    });
    computing.recv().expect("the thread is computing");
    paused_runtime().block_on(async {
        let started = Instant::now();
        let (response, token) = in_flight(&layer, Kind::Session);
        drop(response);
        orphaned(&token).await;
        assert_eq!(started.elapsed().as_secs(), 3600);
    });
    end.send(())
        .expect("the thread has been computing all the time");
    thread.join().expect("the thread does not panic");
    assert!(layer.calls().is_empty());
}

#[test]
fn when_a_runtime_shuts_down_another_one_sends_its_cancels() {
    let (layer, log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let (first, second) = (paused_runtime(), paused_runtime());
    let response = first.block_on(service.oneshot(Kind::Session.request()));
    register(&second, &layer);
    shut_down_with(first, response);
    assert_replayed(&second, &mut replays);
    assert_eq!(log.cancelled(), [(number(7), ClientDisconnected)]);
}

#[test]
fn when_a_runtime_shuts_down_another_one_runs_its_clean_ups() {
    let (layer, _log) = immediate();
    let (first, second) = (paused_runtime(), paused_runtime());
    let (response, token) = first.block_on(async { in_flight(&layer, Kind::Plain) });
    register(&second, &layer);
    let (sender, mut ran) = mpsc::unbounded_channel();
    token.on_cancel(async move |reason| sender.send(reason).expect("the test is listening"));
    shut_down_with(first, response);
    let reason = second.block_on(within("the clean-up to run", ran.recv()));
    assert_eq!(reason, Some(ClientDisconnected));
}

#[test]
fn a_grace_that_began_while_a_runtime_shut_down_ends_on_another_that_only_waits() {
    let (layer, _log) = with_grace();
    let (first, second) = (paused_runtime(), paused_runtime());
    let (response, token) = first.block_on(async { in_flight(&layer, Kind::Session) });
    register(&second, &layer);
    shut_down_with(first, response);
    assert_eq!(token.reason(), None);
    second.block_on(orphaned(&token));
}
