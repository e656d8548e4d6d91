//! A session manager that records its calls and returns values that no other manager would.

use std::{
    fmt,
    future::ready,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{Stream, stream};
use rmcp::{
    RoleServer,
    model::{
        ClientJsonRpcMessage, EmptyResult, NumberOrString, ServerJsonRpcMessage, ServerResult,
    },
    service::{RxJsonRpcMessage, TxJsonRpcMessage},
    transport::{
        Transport,
        streamable_http_server::{
            RestoreOutcome, SessionManager,
            session::{
                EventId, EventStore, EventStoreError, EventStream, ServerSseMessage, SessionId,
            },
        },
    },
};
use serde_json::{Value, json};

/// A method's name and its arguments.
pub(super) type Call = (&'static str, Value);

/// The recorded calls in order. All clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls(Arc<Mutex<Vec<Call>>>);

/// The manager, which is also the transport that it creates.
#[derive(Clone, Debug)]
pub(super) struct Recorder {
    pub(super) calls: Calls,
    pub(super) behaviour: Behaviour,
}

/// How the manager behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behaviour {
    /// All methods succeed.
    Succeeds,
    /// All methods fail.
    Fails,
    /// Sessions cannot be closed.
    CannotClose,
    /// Its transport's methods fail.
    Disconnected,
    /// A session to be restored already exists.
    AlreadyExists,
    /// Restoring is not supported.
    RestoreUnsupported,
}

/// The error from the method with this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failed(pub(super) &'static str);

/// An event store that is only compared by its address.
struct Store;

// === impl Calls ===

impl Calls {
    /// Returns the calls since the last `take`.
    pub(super) fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, method: &'static str, arguments: Value) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push((method, arguments));
    }
}

// === impl Recorder ===

impl Recorder {
    /// Returns a session's transport.
    fn transport(&self) -> Self {
        let mut transport = self.clone();
        if self.behaviour == Behaviour::Disconnected {
            transport.behaviour = Behaviour::Fails;
        }
        transport
    }

    fn answer<T>(
        &self,
        method: &'static str,
        arguments: Value,
        value: T,
    ) -> impl Future<Output = Result<T, Failed>> + use<T> {
        self.calls.record(method, arguments);
        ready(match self.behaviour {
            Behaviour::Fails => Err(Failed(method)),
            Behaviour::CannotClose if method == "close_session" => Err(Failed(method)),
            _ => Ok(value),
        })
    }
}

/// Returns what [`Recorder`]'s `initialize_session` returns.
///
/// It is also the message in its streams.
pub(super) fn message() -> ServerJsonRpcMessage {
    let empty = ServerResult::EmptyResult(EmptyResult {});
    ServerJsonRpcMessage::response(empty, NumberOrString::Number(4711))
}

/// Returns what [`Recorder`]'s streams contain, which is one event with the method's name.
pub(super) fn event(method: &str) -> ServerSseMessage {
    let mut event = ServerSseMessage::new(method, message());
    event.retry = Some(Duration::from_millis(4_711));
    event
}

fn events(method: &str) -> impl Stream<Item = ServerSseMessage> + Send + Sync + 'static {
    stream::iter([event(method)])
}

impl SessionManager for Recorder {
    type Error = Failed;
    type Transport = Self;

    fn create_session(&self) -> impl Future<Output = Result<(SessionId, Self), Failed>> + Send {
        let created = ("created".into(), self.transport());
        self.answer("create_session", json!([]), created)
    }

    fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<ServerJsonRpcMessage, Failed>> + Send {
        let answer = self::message();
        self.answer("initialize_session", json!([**id, message]), answer)
    }

    fn has_session(&self, id: &SessionId) -> impl Future<Output = Result<bool, Failed>> + Send {
        self.answer("has_session", json!([**id]), true)
    }

    fn close_session(&self, id: &SessionId) -> impl Future<Output = Result<(), Failed>> + Send {
        self.answer("close_session", json!([**id]), ())
    }

    fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Failed>,
    > + Send {
        let stream = events("create_stream");
        self.answer("create_stream", json!([**id, message]), stream)
    }

    fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Failed>> + Send {
        self.answer("accept_message", json!([**id, message]), ())
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Failed>,
    > + Send {
        let stream = events("create_standalone_stream");
        self.answer("create_standalone_stream", json!([**id]), stream)
    }

    fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Failed>,
    > + Send {
        let stream = events("resume");
        self.answer("resume", json!([**id, last_event_id]), stream)
    }

    fn restore_session(
        &self,
        id: SessionId,
    ) -> impl Future<Output = Result<RestoreOutcome<Self>, Failed>> + Send {
        let outcome = match self.behaviour {
            Behaviour::AlreadyExists => RestoreOutcome::AlreadyPresent,
            Behaviour::RestoreUnsupported => RestoreOutcome::NotSupported,
            _ => RestoreOutcome::Restored(self.transport()),
        };
        self.answer("restore_session", json!([*id]), outcome)
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        self.calls.record("event_store", json!([]));
        match self.behaviour {
            Behaviour::Fails => None,
            _ => Some(Arc::new(Store)),
        }
    }
}

impl Transport<RoleServer> for Recorder {
    type Error = Failed;

    fn name() -> std::borrow::Cow<'static, str> {
        "recorder".into()
    }

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Failed>> + Send + 'static {
        self.answer("send", json!([item]), ())
    }

    fn receive(&mut self) -> impl Future<Output = Option<RxJsonRpcMessage<RoleServer>>> + Send {
        self.calls.record("receive", json!([]));
        ready(Some(super::request()))
    }

    fn close(&mut self) -> impl Future<Output = Result<(), Failed>> + Send {
        self.answer("close", json!([]), ())
    }
}

// === impl Failed ===

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed on purpose", self.0)
    }
}

impl std::error::Error for Failed {}

// === impl Store ===

#[async_trait::async_trait]
impl EventStore for Store {
    async fn store_event(
        &self,
        stream_id: &str,
        _: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        Ok(format!("stored for {stream_id}"))
    }

    async fn replay_events_after(&self, _: &str) -> Result<EventStream, EventStoreError> {
        Ok(Box::pin(stream::empty()))
    }
}
