//! [`CancellableSessionManager`] forwards everything: calls, return values and errors.
//!
//! `restore_session` and `event_store` have default bodies in rmcp's trait, so a wrapper without them would silently
//! turn off restoring and replaying.

use std::{collections::HashMap, error::Error as _, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager, Grace, transport::CancellableTransport,
};
use rmcp::{
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::{
        Transport,
        streamable_http_server::{
            RestoreOutcome, SessionManager,
            session::{
                ServerSseMessage, SessionId, SessionState, SessionStore, SessionStoreError,
                local::SessionConfig,
            },
        },
    },
};
use serde_json::{Value, json};
use tokio::sync::RwLock;

use self::recorder::{Behaviour, Calls, Failed, Recorder, event, message};
use crate::{setup::Lines, support::*};

mod recorder;

/// For every stream, the wrapper asks whether its events are stored.
const ASKED: (&str, Value) = ("event_store", Value::Array(Vec::new()));

/// Sessions in memory that several servers share.
#[derive(Default)]
struct Store(RwLock<HashMap<String, SessionState>>);

#[tokio::test]
async fn create_session_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let (id, transport) = manager.create_session().await.unwrap();
    assert_eq!(&*id, "created");
    assert_eq!(calls.take(), [("create_session", json!([]))]);
    assert_is_recorder(transport, &calls).await;
}

#[tokio::test]
async fn initialize_session_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let answer = manager.initialize_session(&id(), request()).await.unwrap();
    assert_same(&answer, &message());
    let expected = json!(["the session", request()]);
    assert_eq!(calls.take(), [("initialize_session", expected)]);
}

#[tokio::test(start_paused = true)]
async fn the_log_does_not_name_an_idle_session_that_cannot_be_closed() {
    let lines = Lines::all();
    let (manager, calls) = manager(Behaviour::CannotClose);
    let manager = manager.idle_timeout(Duration::from_secs(1));
    let (id, _transport) = manager.create_session().await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(calls.take()[1], ("close_session", json!([*id])));
    let [line] = &lines.of_layer()[..] else {
        panic!("not one line: {}", lines.text());
    };
    assert!(line.contains("idle session not closed"), "{line}");
    assert!(!line.contains(&*id), "{line}");
}

#[tokio::test]
async fn has_session_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    assert!(manager.has_session(&id()).await.unwrap());
    assert_eq!(calls.take(), [("has_session", json!(["the session"]))]);
}

#[tokio::test]
async fn close_session_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    manager.close_session(&id()).await.unwrap();
    assert_eq!(calls.take(), [("close_session", json!(["the session"]))]);
}

#[tokio::test]
async fn create_stream_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let stream = manager.create_stream(&id(), request()).await.unwrap();
    assert_carries(stream, "create_stream").await;
    let expected = json!(["the session", request()]);
    assert_eq!(calls.take(), [("create_stream", expected), ASKED]);
}

#[tokio::test]
async fn accept_message_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    manager.accept_message(&id(), request()).await.unwrap();
    let expected = json!(["the session", request()]);
    assert_eq!(calls.take(), [("accept_message", expected)]);
}

#[tokio::test]
async fn create_standalone_stream_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let stream = manager.create_standalone_stream(&id()).await.unwrap();
    assert_carries(stream, "create_standalone_stream").await;
    let expected = json!(["the session"]);
    assert_eq!(
        calls.take(),
        [("create_standalone_stream", expected), ASKED]
    );
}

#[tokio::test]
async fn resume_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let stream = manager.create_standalone_stream(&id()).await.unwrap();
    let events: Vec<_> = stream.collect().await;
    let seen = events[0].event_id.clone().expect("an id");
    calls.take();

    let stream = manager.resume(&id(), seen).await.unwrap();

    assert_carries(stream, "resume").await;
    // Under the id given by the inner manager.
    let expected = json!(["the session", "create_standalone_stream"]);
    assert_eq!(calls.take(), [ASKED, ("resume", expected)]);
}

#[tokio::test]
async fn restore_session_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let RestoreOutcome::Restored(transport) = manager.restore_session(id()).await.unwrap() else {
        panic!("the inner manager restores the session");
    };
    let expected = json!(["the session"]);
    assert_eq!(calls.take(), [("restore_session", expected)]);
    assert_is_recorder(transport, &calls).await;
}

#[tokio::test]
async fn a_session_that_was_not_restored_is_reported_as_such() {
    let (present, _) = manager(Behaviour::AlreadyExists);
    let outcome = present.restore_session(id()).await.unwrap();
    assert!(matches!(outcome, RestoreOutcome::AlreadyPresent));

    let (unsupported, _) = manager(Behaviour::RestoreUnsupported);
    let outcome = unsupported.restore_session(id()).await.unwrap();
    assert!(matches!(outcome, RestoreOutcome::NotSupported));
}

#[tokio::test]
async fn event_store_is_forwarded() {
    let (manager, calls) = manager(Behaviour::Succeeds);
    let store = manager.event_store().unwrap();
    let stored = store.store_event("a stream", &event("any")).await.unwrap();
    assert!(stored.starts_with("stored for a stream."), "{stored}");
    assert_eq!(calls.take(), [("event_store", json!([]))]);
}

#[tokio::test]
async fn every_error_is_forwarded_unchanged() {
    let (manager, _) = manager(Behaviour::Fails);
    let id = id();
    let errors = [
        manager.create_session().await.err(),
        manager.initialize_session(&id, request()).await.err(),
        manager.has_session(&id).await.err(),
        manager.close_session(&id).await.err(),
        manager.create_stream(&id, request()).await.err(),
        manager.accept_message(&id, request()).await.err(),
        manager.create_standalone_stream(&id).await.err(),
        manager.resume(&id, "3/1".to_owned()).await.err(),
        manager.restore_session(id.clone()).await.err(),
    ];
    let expected = [
        "create_session",
        "initialize_session",
        "has_session",
        "close_session",
        "create_stream",
        "accept_message",
        "create_standalone_stream",
        "resume",
        "restore_session",
    ];
    assert_eq!(errors, expected.map(|method| Some(Failed(method))));
    assert!(manager.event_store().is_none());
}

#[tokio::test]
async fn an_error_of_the_transport_is_the_source_of_the_wrappers_own() {
    let (manager, _) = manager(Behaviour::Disconnected);
    let (_, mut transport) = manager.create_session().await.unwrap();
    let errors = [
        ("send", transport.send(message()).await.unwrap_err()),
        ("close", transport.close().await.unwrap_err()),
    ];
    for (method, error) in errors {
        assert!(!error.is_cancelled());
        let source = error.source().and_then(|source| source.downcast_ref());
        assert_eq!(source, Some(&Failed(method)));
    }
}

/// Restores a session end to end, with rmcp's own manager.
///
/// The second server knows the session only from the store, yet it cancels its calls.
#[tokio::test]
async fn a_session_that_was_restored_on_another_server_is_tracked_by_it() {
    let store = Arc::new(Store::default());
    let (first, _) = storing_in(&store).await;
    let (second, witness) = storing_in(&store).await;
    let mcp = Mcp::session(first.addr, PATH).await;
    // The same client, routed to the other server.
    let session = mcp.session_id().expect("a session id");
    let mcp = Mcp::stateless(second.addr, PATH).header("mcp-session-id", session);

    let call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    witness.started("a").await;
    call.fin();

    assert!(witness.ended("a").await.is_cancelled());
}

/// Returns the manager under test, and the calls recorded by its inner manager.
fn manager(behaviour: Behaviour) -> (CancellableSessionManager<Recorder>, Calls) {
    let calls = Calls::default();
    let recorder = Recorder {
        calls: calls.clone(),
        behaviour,
    };
    (CancellableSessionManager::new(recorder), calls)
}

fn id() -> SessionId {
    "the session".into()
}

/// Returns a message that can only be a request.
fn request() -> ClientJsonRpcMessage {
    let request = json!({
        "jsonrpc": "2.0",
        "id": 7,
        "method": "tools/call",
        "params": { "name": "hold", "arguments": { "label": "a" } },
    });
    serde_json::from_value(request).expect("a request")
}

fn assert_same(left: &ServerJsonRpcMessage, right: &ServerJsonRpcMessage) {
    assert_eq!(json!(left), json!(right));
}

/// Asserts that the stream is the one that the recorder returns for this method.
async fn assert_carries(stream: impl Stream<Item = ServerSseMessage>, method: &str) {
    let events: Vec<_> = stream.collect().await;
    let [sent] = &events[..] else {
        panic!("one event expected, not {}", events.len());
    };
    let expected = event(method);
    // There is a store, so the event id is bound to its session.
    let id = sent.event_id.as_deref().expect("an id");
    let own = id.rsplit_once('.').map(|(own, _)| own);
    assert_eq!(own, expected.event_id.as_deref());
    assert_eq!(sent.retry, expected.retry);
    let message = sent.message.as_ref().expect("a message");
    assert_same(message, &self::message());
}

/// Asserts that the transport is the wrapped recorder.
async fn assert_is_recorder(mut transport: CancellableTransport<Recorder>, calls: &Calls) {
    type Wrapped = CancellableTransport<Recorder>;
    assert_eq!(Wrapped::name(), "recorder");
    transport.send(message()).await.expect("sent");
    let received = transport.receive().await.expect("a message");
    assert_eq!(json!(received), json!(request()));
    transport.close().await.expect("closed");
    let expected = [
        ("send", json!([message()])),
        ("receive", json!([])),
        ("close", json!([])),
    ];
    assert_eq!(calls.take(), expected);
}

/// Starts a server that also saves its sessions in `store`.
async fn storing_in(store: &Arc<Store>) -> (Served, Witness) {
    let witness = Witness::new();
    let mut config = Mode::Session.config();
    config.session_store = Some(store.clone());
    let sessions = CancellableSessionManager::local(SessionConfig::default());
    let service = Tools::new(&witness).service_with(config, Arc::new(sessions));
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    (serve(router(service).layer(layer)).await, witness)
}

// === impl Store ===

#[async_trait::async_trait]
impl SessionStore for Store {
    async fn load(&self, session_id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        Ok(self.0.read().await.get(session_id).cloned())
    }

    async fn store(&self, session_id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        let mut sessions = self.0.write().await;
        sessions.insert(session_id.to_owned(), state.clone());
        Ok(())
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        self.0.write().await.remove(session_id);
        Ok(())
    }
}
