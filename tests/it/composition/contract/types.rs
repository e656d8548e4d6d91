//! What the types promise, as checked by the compiler.

use std::{error::Error, fmt::Debug};

use bytes::Bytes;
use http_body_util::Full;
use mcp_cancel_on_disconnect::{
    CallId, CallToken, Calls, CancelOnDisconnect, CancelOnDisconnectLayer, CancelReason,
    CancellableSessionManager, Grace, Outcome, RequestId,
    body::{ResponseBody, ResponseFuture, TeeBody},
    observe::{CancelError, DetachCause, Detachment, ParseFailure, SessionIds},
    transport::{CancellableTransport, TransportError},
};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use tower::util::BoxCloneSyncService;

fn send<T: Send + 'static>() {}
fn sync<T: Send + Sync + 'static>() {}
fn clone<T: Clone>() {}
fn copy<T: Copy>() {}
fn debug<T: Debug>() {}
fn error<T: Error + Send + Sync + 'static>() {}
fn unpin<T: Unpin>() {}

/// A type that is `Send` but not `Sync`, as futures and bodies often are.
type OnlySend = std::cell::Cell<u8>;

/// An inner service like those in axum.
type Inner = BoxCloneSyncService<(), (), ()>;

const _: fn() = || {
    sync::<CancelOnDisconnectLayer>();
    sync::<CancelOnDisconnect<Inner>>();
    sync::<CallToken>();
    sync::<Calls>();
    sync::<CancellableSessionManager<LocalSessionManager>>();
    sync::<ResponseFuture<Inner>>();
    sync::<ResponseBody<Full<Bytes>>>();
    sync::<TeeBody<Full<Bytes>>>();
    sync::<CancellableTransport<Inner>>();

    send::<CancelOnDisconnect<OnlySend>>();
    send::<ResponseFuture<OnlySend>>();
    send::<ResponseBody<OnlySend>>();
    send::<TeeBody<OnlySend>>();

    clone::<CancelOnDisconnectLayer>();
    clone::<CancelOnDisconnect<Inner>>();
    clone::<CallToken>();
    clone::<Calls>();
    clone::<RequestId>();
    copy::<CallId>();
    copy::<CancelReason>();
    copy::<DetachCause>();
    copy::<Detachment>();
    copy::<SessionIds>();
    copy::<Grace>();
    copy::<Outcome>();
    copy::<ParseFailure>();

    debug::<CancelOnDisconnectLayer>();
    debug::<CancelOnDisconnect<OnlySend>>();
    debug::<ResponseFuture<OnlySend>>();
    debug::<ResponseBody<OnlySend>>();
    debug::<TeeBody<OnlySend>>();
    debug::<CallToken>();
    debug::<Calls>();
    debug::<CancellableSessionManager<LocalSessionManager>>();
    debug::<CancellableTransport<OnlySend>>();

    #[cfg(feature = "metrics")]
    {
        sync::<mcp_cancel_on_disconnect::observe::Metrics>();
        clone::<mcp_cancel_on_disconnect::observe::Metrics>();
        debug::<mcp_cancel_on_disconnect::observe::Metrics>();
    }

    error::<CancelError>();
    error::<TransportError<CancelError>>();

    unpin::<ResponseFuture<OnlySend>>();
    unpin::<ResponseBody<OnlySend>>();
    unpin::<TeeBody<OnlySend>>();
};

#[test]
fn debug_output_does_not_show_a_session_id() {
    use super::exchange::{Kind, exchange, immediate};
    use super::script::Script;

    let (layer, _log) = immediate();
    let (response, token) = exchange(&layer, Kind::Session.request(), &Script::stalled());
    let shown = format!(
        "{token:?} {:?} {layer:?} {:?}",
        response.body(),
        layer.calls()
    );
    assert!(!shown.contains("the-session"), "{shown}");
}

#[tokio::test]
async fn debug_of_events_does_not_show_a_session_id() {
    use super::exchange::{Kind, exchange, immediate};
    use super::script::Script;
    use mcp_cancel_on_disconnect::Limits;
    use std::sync::{Arc, Mutex};

    let shown: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = shown.clone();
    let (layer, _log) = immediate();
    let layer = layer
        .limits(Limits::default().retained(0))
        .observe_fn(move |event| seen.lock().unwrap().push(format!("{event:?}")));
    drop(exchange(
        &layer,
        Kind::Session.request(),
        &Script::stalled(),
    ));
    let shown = shown.lock().unwrap().join("\n");
    assert!(shown.contains("Ended"), "{shown}");
    assert!(!shown.contains("the-session"), "{shown}");
}
