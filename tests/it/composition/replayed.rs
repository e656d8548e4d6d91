//! To services inside the layer, a cancellation replayed as a POST is a request in its own right.

use std::{
    collections::HashSet,
    future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{
    Router,
    body::Body,
    error_handling::HandleError,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, body::TeeBody};
use serde_json::json;
use tower::{Layer as _, ServiceExt as _, service_fn};

use crate::{
    setup::{DISCONNECTED, EXCHANGE, EventKind, Events, Plan, SavedSessions, Server, arguments},
    stack::{bare, wrapped},
    support::*,
};

/// Headers by which a service recognizes a repeated request or checks its body.
const SINGLE_REQUEST_HEADERS: [&str; 10] = [
    "idempotency-key",
    "x-idempotency-key",
    "signature",
    "signature-input",
    "x-signature-256",
    "content-digest",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
];

/// A header with its value.
type Seen = (&'static str, Vec<u8>);

/// If the cancellation repeated such a header, the service would mistake it for the call.
///
/// It would then answer the cancellation in the server's place.
#[tokio::test]
async fn a_cancel_passes_a_service_that_answers_a_request_which_it_has_seen() {
    let seen: Arc<Mutex<HashSet<Seen>>> = Arc::default();
    let once = move |router: Router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            let named = SINGLE_REQUEST_HEADERS.iter().filter_map(|name| {
                let value = request.headers().get(*name)?;
                Some((*name, value.as_bytes().to_vec()))
            });
            let named: Vec<_> = named.collect();
            let is_new = {
                let mut seen = seen.lock().unwrap();
                named.into_iter().all(|named| seen.insert(named))
            };
            async move {
                if is_new {
                    next.run(request).await
                } else {
                    StatusCode::ACCEPTED.into_response()
                }
            }
        }))
    };
    let (setup, mcp) = Plan::of(Server::LayerOnly).inside(once).client().await;
    for (id, name) in (1..).zip(SINGLE_REQUEST_HEADERS) {
        let marked = mcp.clone().header(name, "\"of this request\"");
        let call = setup.start_call(&marked, id, "hold", name).await;
        let again = marked.call(id, "hold", arguments("again")).await;
        assert_eq!({ again }.head().await.status, 202, "{name}");

        call.fin();

        assert!(setup.witness.ended(name).await.is_cancelled(), "{name}");
        assert_eq!(setup.witness.starts("again"), 0);
    }
}

/// Both servers have the same path inside one layer. A request's `Host` decides which one gets it.
#[tokio::test]
async fn two_servers_by_host_cancel_the_calls_of_their_own_clients() {
    for wrapped_first in [true, false] {
        let witness = Witness::new();
        let tools = Tools::new(&witness);
        let with_manager = router(tools.service(Mode::Session, wrapped()));
        let alone = router(tools.service(Mode::Session, bare()));
        let managed_host: Arc<Mutex<String>> = Arc::default();
        let host = managed_host.clone();
        let by_host = move |request: Request| {
            let requested_host = request.headers()["host"].to_str().expect("text");
            let is_managed = requested_host == *host.lock().unwrap();
            let inner = if is_managed {
                with_manager.clone()
            } else {
                alone.clone()
            };
            inner.oneshot(request)
        };
        let events = Events::default();
        let layer = CancelOnDisconnectLayer::new()
            .grace(Grace::Immediate)
            .observe(events.observer());
        let app = Router::new().fallback(by_host).layer(layer);
        let (one, other) = (serve(app.clone()).await, serve(app).await);
        let (managed, plain) = if wrapped_first {
            (one.addr, other.addr)
        } else {
            (other.addr, one.addr)
        };
        *managed_host.lock().unwrap() = managed.to_string();
        let clients = [
            Mcp::session(one.addr, PATH).await,
            Mcp::session(other.addr, PATH).await,
        ];
        let [managed, plain] = [managed, plain].map(|addr| (addr == other.addr) as usize);

        for round in 0..2 {
            let labels = [0, 1].map(|nth| format!("{wrapped_first} {round} {nth}"));
            let mut calls = Vec::new();
            for (mcp, label) in clients.iter().zip(&labels) {
                let mcp = mcp.clone().header(EXCHANGE, label);
                calls.push(Some(mcp.call(round, "hold", arguments(label)).await));
                witness.started(label).await;
            }
            for disconnected_call in [managed, plain] {
                calls[disconnected_call]
                    .take()
                    .expect("the call is connected")
                    .fin();
                let label = &labels[disconnected_call];
                assert!(witness.ended(label).await.is_cancelled(), "{label}");
                let end = events.ended(&clients[disconnected_call], round).await;
                assert_eq!(end, DISCONNECTED);
                if disconnected_call == managed {
                    assert!(witness.is_running(&labels[plain]), "{label}");
                }
            }
        }
    }
}

/// A DPoP proof (RFC 9449) is valid for a single request, so a replay never has a valid one.
#[tokio::test]
async fn a_cancel_that_is_refused_for_its_repeated_proof_is_reported_as_failed() {
    let seen: Arc<Mutex<HashSet<Vec<u8>>>> = Arc::default();
    let once = move |router: Router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            let is_new = request.headers().get("dpop").is_none_or(|proof| {
                let mut seen = seen.lock().unwrap();
                seen.insert(proof.as_bytes().to_vec())
            });
            async move {
                if is_new {
                    next.run(request).await
                } else {
                    StatusCode::UNAUTHORIZED.into_response()
                }
            }
        }))
    };
    let (setup, mcp) = Plan::of(Server::LayerOnly).inside(once).client().await;
    let proven = mcp.clone().header("dpop", "a proof");
    let call = setup.start_call(&proven, 1, "stubborn", "runs on").await;

    call.fin();

    let failed = EventKind::CancelFailed(Some(StatusCode::UNAUTHORIZED));
    setup.events.count(&mcp, 1, 1, |kind| kind == failed).await;
    let expected = [EventKind::Started, EventKind::Ended(DISCONNECTED), failed];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(setup.tokens.of("runs on").is_cancelled());
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("runs on"));
    setup.witness.release("runs on");
    assert!(setup.witness.ended("runs on").await.is_completed());
}

/// A middleware that sheds load may answer with an error, which becomes a response only outside the layer.
#[tokio::test]
async fn a_cancel_that_the_service_fails_is_sent_again() {
    let witness = Witness::new();
    let is_full = Arc::new(AtomicBool::new(false));
    let server = router(Tools::new(&witness).service(Mode::Session, bare()));
    let shedding = service_fn({
        let is_full = is_full.clone();
        move |request: http::Request<TeeBody<Body>>| {
            let is_shed = is_full.swap(false, Ordering::SeqCst);
            let server = server.clone();
            async move {
                if is_shed {
                    return Err("overloaded");
                }
                Ok(server
                    .oneshot(request.map(Body::new))
                    .await
                    .unwrap_or_else(|never| match never {}))
            }
        }
    });
    let service = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .layer(shedding);
    let app = Router::new().fallback_service(HandleError::new(service, |_: &'static str| {
        future::ready(StatusCode::SERVICE_UNAVAILABLE)
    }));
    let served = serve(app).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let call = mcp.call(1, "hold", arguments("a")).await;
    witness.started("a").await;

    is_full.store(true, Ordering::SeqCst);
    call.fin();

    assert!(witness.ended("a").await.is_cancelled());
    assert!(
        !is_full.load(Ordering::SeqCst),
        "the first cancellation was shed"
    );
}

/// Both servers restore sessions from one store.
///
/// A session on one of them is therefore known to the other under the same id.
#[tokio::test]
async fn one_of_two_servers_with_the_same_session_id_does_not_end_the_call_of_the_other() {
    for managed_leaves in [true, false] {
        for how in ["hangs up", "cancels", "deletes"] {
            let witness = Witness::new();
            let tools = Tools::new(&witness);
            let store = Arc::new(SavedSessions::default());
            let config = || {
                let mut config = Mode::Session.config();
                config.session_store = Some(store.clone());
                config
            };
            let with_manager = router(tools.service_with(config(), wrapped()));
            let alone = router(tools.service_with(config(), bare()));
            let managed_host: Arc<Mutex<String>> = Arc::default();
            let host = managed_host.clone();
            let by_host = move |request: Request| {
                let requested_host = request.headers()["host"].to_str().expect("text");
                let is_managed = requested_host == *host.lock().unwrap();
                let inner = if is_managed { &with_manager } else { &alone };
                inner.clone().oneshot(request)
            };
            let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
            let app = Router::new().fallback(by_host).layer(layer);
            let (managed, plain) = (serve(app.clone()).await, serve(app).await);
            *managed_host.lock().unwrap() = managed.addr.to_string();
            let (from, to) = if managed_leaves {
                (managed.addr, plain.addr)
            } else {
                (plain.addr, managed.addr)
            };
            let first_client = Mcp::session(from, PATH).await;
            let second_client = first_client.at(to);
            let disconnected_call = first_client.call(7, "hold", arguments("leaving")).await;
            witness.started("leaving").await;
            let mut connected_call = second_client.call(7, "hold", arguments("staying")).await;
            witness.started("staying").await;

            match how {
                "hangs up" => disconnected_call.fin(),
                "cancels" => assert_eq!(first_client.cancel(7).await, 202),
                _ => assert!((200..300).contains(&first_client.delete().await)),
            }

            let case = format!("the managed call ends: {managed_leaves}, {how}");
            let left = witness.ended("leaving").await;
            assert!(left.is_cancelled() || how == "deletes", "{case}: {left:?}");
            let mut echo = second_client
                .call("echo", "echo", json!({ "text": "hi" }))
                .await;
            assert!(echo.answer().await.is_some(), "{case}");
            assert!(witness.is_running("staying"), "{case}");
            witness.release("staying");
            connected_call.assert_done("staying").await;
        }
    }
}
