//! Exchanges that are dropped where no runtime is, or not the one they came with.

use std::{convert::Infallible, future::pending, thread, time::Duration};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer,
    CancelReason::{ClientDisconnected, Orphaned},
    Grace, Outcome, ResponseBody,
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc,
};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

use super::{
    exchange::{
        Answer, Asked, Kind, Tokens, event_stream, exchange, immediate, poll_once, reading,
    },
    script::{Script, Scripted},
};
use crate::{
    log::{Happened, Log, number},
    support::within,
};

const HOUR: Duration = Duration::from_secs(60 * 60);

/// A runtime whose clock jumps to the next deadline.
fn paused() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

fn patient() -> (CancelOnDisconnectLayer, Log) {
    Log::of(CancelOnDisconnectLayer::new().grace(Grace::After(HOUR)))
}

/// The body of a call in flight. The driver starts on the current runtime, if there is one.
fn in_flight(
    layer: &CancelOnDisconnectLayer,
    kind: Kind,
) -> (Response<ResponseBody<Scripted>>, CallToken) {
    exchange(layer, kind.request(), &Script::stalled())
}

/// A service that keeps its calls open, and the messages that are replayed into it.
fn with_replays() -> (
    impl Service<Asked, Response = Response<Scripted>, Error = Infallible, Future: Send> + Clone + Send,
    mpsc::UnboundedReceiver<Bytes>,
) {
    let (replayed, replays) = mpsc::unbounded_channel();
    let service = service_fn(move |request: Asked| {
        let replayed = replayed.clone();
        async move {
            let is_replay = request.extensions().get::<CallToken>().is_none();
            let Ok(body) = request.into_body().collect().await;
            if is_replay {
                replayed.send(body.to_bytes()).expect("the test listens");
            }
            Ok(event_stream(Script::stalled().body()))
        }
    });
    (service, replays)
}

async fn orphaned(token: &CallToken) {
    within("the deadline", token.cancelled()).await;
    assert_eq!(token.reason(), Some(Orphaned));
}

#[test]
fn a_token_fires_where_no_runtime_ever_was() {
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = in_flight(&layer, kind);
        drop(response);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        let failed = |event: &Happened| matches!(event, Happened::CancelFailed(_, None));
        // Nobody could run the replay, and that is said.
        let unsaid = kind != Kind::Session;
        assert_eq!(!log.events().iter().any(failed), unsaid, "{kind:?}");
    }
}

#[test]
fn a_grace_may_begin_where_no_runtime_ever_was() {
    let (layer, _log) = patient();
    let (response, token) = in_flight(&layer, Kind::Session);
    drop(response);
    assert_eq!(token.reason(), None);
    assert_eq!(layer.calls().len(), 1);
    paused().block_on(async {
        // Any request brings a runtime.
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
    let replay = runtime.block_on(within("the replay", replays.recv()));
    let replay = replay.expect("the service lives");
    let message: serde_json::Value = serde_json::from_slice(&replay).expect("JSON");
    assert_eq!(message["method"], "notifications/cancelled");
    assert_eq!(message["params"]["requestId"], 7);
}

#[test]
fn a_runtime_that_shuts_down_cancels_the_calls_whose_bodies_it_held() {
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let runtime = paused();
        let (response, token) = runtime.block_on(async { in_flight(&layer, kind) });
        let mut body = response.into_body();
        runtime.spawn(async move { body.frame().await.is_some() });
        runtime.block_on(tokio::task::yield_now());
        assert_eq!(token.reason(), None, "{kind:?}");
        drop(runtime);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        if kind.is_call() {
            let end = [Outcome::Cancelled(ClientDisconnected)];
            assert_eq!(log.ends(&number(7)), end, "{kind:?}");
        }
    }
}

#[test]
fn a_runtime_that_shuts_down_cancels_the_calls_that_have_no_head_yet() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let tokens = Tokens::default();
        let service = layer.layer(reading(&tokens, |_| pending::<Answer<Infallible>>()));
        let runtime = paused();
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
    let (layer, log) = patient();
    let runtime = paused();
    let (response, token) = runtime.block_on(async { in_flight(&layer, Kind::Session) });
    runtime.spawn(async move {
        let _response = response;
        pending::<()>().await;
    });
    runtime.block_on(tokio::task::yield_now());
    drop(runtime);
    assert_eq!(token.reason(), None);
    assert!(matches!(log.events().last(), Some(Happened::Detached(_))));
    paused().block_on(async {
        drop(in_flight(&layer, Kind::Plain));
        orphaned(&token).await;
    });
}

#[test]
fn a_grace_ends_on_the_second_runtime_of_a_layer() {
    let (layer, _log) = patient();
    let first = paused();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    drop(first);
    paused().block_on(async {
        let (response, token) = in_flight(&layer, Kind::Session);
        drop(response);
        orphaned(&token).await;
    });
    assert!(layer.calls().is_empty());
}

#[test]
fn a_grace_ends_on_a_runtime_that_outlives_the_one_the_layer_met_first() {
    let (layer, _log) = patient();
    let first = paused();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    let second = paused();
    let (response, token) = second.block_on(async { in_flight(&layer, Kind::Session) });
    drop(first);
    second.block_on(async {
        drop(response);
        orphaned(&token).await;
    });
}

#[test]
fn a_cancel_reaches_the_server_when_the_runtime_the_layer_met_first_has_ended() {
    let (layer, _log) = immediate();
    let (service, mut replays) = with_replays();
    let service = layer.layer(service);
    let first = paused();
    first.block_on(async { drop(in_flight(&layer, Kind::Plain)) });
    let second = paused();
    let response = second.block_on(service.oneshot(Kind::Session.request()));
    drop(first);
    second.block_on(async {
        drop(response);
        let replay = within("the replay", replays.recv()).await;
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
