//! What happens while the manager inside takes its time: for a cancel, for a resume.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Waker},
};

use axum::{
    Router,
    body::{Body, to_bytes},
};
use futures_util::{
    FutureExt, Stream,
    future::{BoxFuture, MaybeDone, maybe_done},
};
use http::{Request, Response};
use http_body_util::BodyExt;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Event, Grace,
};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ClientJsonRpcMessage,
        ClientNotification, ContentBlock, ServerJsonRpcMessage,
    },
    service::RequestContext,
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager, StreamableHttpService,
        session::{
            ServerSseMessage, SessionId,
            local::{LocalSessionManager, LocalSessionManagerError},
        },
    },
};
use serde_json::{Value, json};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore},
    task::yield_now,
};
use tower::ServiceExt;

/// Takes a cancel, and gives out the stream of a resume, only when the gate is open. Writes down what it did.
struct Gated {
    inner: LocalSessionManager,
    gate: Semaphore,
    waiting: Semaphore,
    log: Mutex<Vec<&'static str>>,
}

/// A request that an observer begins.
type Deleting = Pin<Box<MaybeDone<BoxFuture<'static, Result<Response<Body>, Infallible>>>>>;

/// Answers when it is told to.
#[derive(Clone, Default)]
struct Waits(Arc<Notify>);

impl ServerHandler for Waits {
    async fn call_tool(
        &self,
        _request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.0.notified().await;
        Ok(CallToolResult::success(vec![ContentBlock::text("done")]).into())
    }
}

#[tokio::test]
async fn a_session_is_closed_after_the_cancel_has_arrived() {
    let gated = Arc::new(Gated::new());
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let app = serve(&gated, Waits::default(), layer);
    let session = open(&app).await;
    let response = call(&app, &session).await;

    drop(response);
    drop(gated.waiting.acquire().await);
    let request = request("DELETE", Some(&session))
        .body(Body::empty())
        .unwrap();
    let deleted = Handle::current().spawn(app.clone().oneshot(request));
    for _ in 0..100 {
        yield_now().await;
    }
    assert_eq!(*gated.log.lock().unwrap(), [] as [&str; 0]);

    gated.gate.add_permits(1);
    let deleted = deleted.await.unwrap().unwrap();
    assert!(deleted.status().is_success(), "{}", deleted.status());
    assert_eq!(*gated.log.lock().unwrap(), ["cancelled", "closed"]);
}

/// Who hears of the end may be fast: this observer deletes the session before anybody was told more.
#[tokio::test]
async fn a_cancel_reaches_its_handler_though_the_session_is_deleted_as_the_call_ends() {
    for hangs_up in [false, true] {
        let gated = Arc::new(Gated::new());
        gated.gate.add_permits(1);
        let deleting: Arc<Mutex<Option<Deleting>>> = Arc::default();
        let at_the_end = deleting.clone();
        let layer = CancelOnDisconnectLayer::new()
            .grace(Grace::Immediate)
            .observe(move |event: &Event<'_>| {
                if let Event::Ended { .. } = event
                    && let Some(delete) = &mut *at_the_end.lock().unwrap()
                {
                    let mut context = Context::from_waker(Waker::noop());
                    let _begun = delete.as_mut().poll(&mut context);
                }
            });
        let calls = layer.calls();
        let app = serve(&gated, Waits::default(), layer);
        let session = open(&app).await;
        let response = call(&app, &session).await;
        let delete = request("DELETE", Some(&session));
        let delete = delete.body(Body::empty()).unwrap();
        let delete = app.clone().oneshot(delete).boxed();
        *deleting.lock().unwrap() = Some(Box::pin(maybe_done(delete)));

        if hangs_up {
            drop(response);
        } else {
            let call = calls.snapshot().pop().unwrap();
            assert!(calls.cancel(call.info().id(), CancelReason::Requested));
        }

        let mut delete = deleting.lock().unwrap().take().unwrap();
        delete.as_mut().await;
        let deleted = delete.as_mut().take_output().unwrap().unwrap();
        assert!(deleted.status().is_success(), "{}", deleted.status());
        let log = gated.log.lock().unwrap().clone();
        assert_eq!(log, ["cancelled", "closed"], "hangs up: {hangs_up}");
    }
}

/// The manager inside has moved the call to the stream that this resume would have got.
#[tokio::test]
async fn an_answer_after_a_resume_that_was_given_up_half_way_is_kept() {
    let gated = Arc::new(Gated::new());
    let waits = Waits::default();
    let layer = CancelOnDisconnectLayer::new();
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let mut body = call(&app, &session).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    let id = first.lines().find_map(|line| line.strip_prefix("id:"));
    let id = id.unwrap().trim().to_owned();
    drop(body);

    let mut resume = Box::pin(send(&app, resume(&session, &id)));
    tokio::select! {
        response = &mut resume => panic!("it is not to be answered: {response:?}"),
        permit = gated.waiting.acquire() => permit.unwrap().forget(),
    }
    drop(resume);
    gated.gate.add_permits(2);
    waits.0.notify_one();
    while !calls.is_empty() {
        yield_now().await;
    }

    let response = send(&app, self::resume(&session, &id)).await;
    let whole = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let whole = String::from_utf8(whole.to_vec()).unwrap();
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
}

fn serve(gated: &Arc<Gated>, tools: Waits, layer: CancelOnDisconnectLayer) -> Router {
    let sessions = CancellableSessionManager::new(Shared(gated.clone()));
    let tools = move || Ok(tools.clone());
    let service = StreamableHttpService::new(tools, sessions.into(), Default::default());
    Router::new().nest_service("/mcp", service).layer(layer)
}

async fn call(app: &Router, session: &str) -> Response<Body> {
    let call =
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "x" } });
    let response = send(app, post(call, Some(session))).await;
    assert_eq!(response.status(), 200);
    response
}

fn resume(session: &str, last_event_id: &str) -> Request<Body> {
    let request = request("GET", Some(session)).header("last-event-id", last_event_id);
    request.body(Body::empty()).unwrap()
}

async fn open(app: &Router) -> String {
    let params = json!({
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" },
    });
    let initialize = json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params });
    let response = send(app, post(initialize, None)).await;
    let session = response.headers()["mcp-session-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let _whole = to_bytes(response.into_body(), usize::MAX).await;
    let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
    let accepted = send(app, post(initialized, Some(&session))).await;
    assert_eq!(accepted.status(), 202);
    session
}

async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.unwrap()
}

fn post(message: Value, session: Option<&str>) -> Request<Body> {
    let request = request("POST", session).header("content-type", "application/json");
    request.body(Body::from(message.to_string())).unwrap()
}

fn request(method: &str, session: Option<&str>) -> http::request::Builder {
    let request = Request::builder()
        .method(method)
        .uri("/mcp")
        .header("host", "localhost")
        .header("accept", "application/json, text/event-stream");
    match session {
        Some(session) => request.header("mcp-session-id", session),
        None => request,
    }
}

impl Gated {
    fn new() -> Self {
        Self {
            inner: LocalSessionManager::default(),
            gate: Semaphore::new(0),
            waiting: Semaphore::new(0),
            log: Mutex::default(),
        }
    }
}

/// The same manager for the service and for the test.
struct Shared(Arc<Gated>);

impl SessionManager for Shared {
    type Error = LocalSessionManagerError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        self.0.inner.create_session().await
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        self.0.inner.initialize_session(id, message).await
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.0.inner.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.0.log.lock().unwrap().push("closed");
        self.0.inner.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.0.inner.create_stream(id, message).await
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), Self::Error> {
        let cancels = matches!(
            &message,
            ClientJsonRpcMessage::Notification(message)
                if matches!(message.notification, ClientNotification::CancelledNotification(_))
        );
        if cancels {
            self.0.waiting.add_permits(1);
            self.0.gate.acquire().await.unwrap().forget();
            self.0.log.lock().unwrap().push("cancelled");
        }
        self.0.inner.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.0.inner.create_standalone_stream(id).await
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let stream = self.0.inner.resume(id, last_event_id).await?;
        self.0.waiting.add_permits(1);
        self.0.gate.acquire().await.unwrap().forget();
        Ok(stream)
    }

    async fn restore_session(
        &self,
        id: SessionId,
    ) -> Result<RestoreOutcome<Self::Transport>, Self::Error> {
        self.0.inner.restore_session(id).await
    }
}
