//! A server that is not rmcp's. It accepts calls but does not act on any other message.

use std::{
    convert::Infallible,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, Method, Response};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, Grace, body::TeeBody};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneSyncService};

use super::log::Log;

/// A server that answers every request for a stream with one, whose events the test writes.
pub(crate) struct Foreign {
    pub(crate) layer: CancelOnDisconnectLayer,
    pub(crate) log: Log,
    service: Service,
    feeds: Mutex<mpsc::UnboundedReceiver<Feed>>,
    open: Mutex<Vec<Feed>>,
    cancels: Arc<AtomicUsize>,
    token: Arc<Mutex<Option<CallToken>>>,
    on_next_request: Arc<Mutex<Option<Action>>>,
}

/// An action that the test plans.
type Action = Box<dyn FnOnce() + Send>;

type Feed = mpsc::UnboundedSender<Bytes>;
type Service = BoxCloneSyncService<http::Request<Body>, Response<Body>, Infallible>;

// === impl Foreign ===

impl Foreign {
    pub(crate) fn with(grace: Grace) -> Self {
        let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(grace));
        let (feed_sender, feeds) = mpsc::unbounded_channel();
        let cancels = Arc::new(AtomicUsize::new(0));
        let counted = cancels.clone();
        let token = Arc::new(Mutex::new(None));
        let on_next_request = Arc::new(Mutex::new(None::<Action>));
        let (first_token, next_action) = (token.clone(), on_next_request.clone());
        let service = layer.layer(service_fn(move |request: http::Request<TeeBody<Body>>| {
            let (feed_sender, cancels) = (feed_sender.clone(), counted.clone());
            let action = next_action.lock().unwrap().take();
            if let Some(action) = action {
                action();
            }
            if let Some(token) = request.extensions().get::<CallToken>() {
                first_token
                    .lock()
                    .unwrap()
                    .get_or_insert_with(|| token.clone());
            }
            async move {
                let is_post = request.method() == Method::POST;
                let body = request.into_body().collect().await.expect("a body");
                let message: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
                let mut response = Response::new(Body::empty());
                if message["method"] == "notifications/cancelled" {
                    cancels.fetch_add(1, Ordering::Relaxed);
                }
                if is_post && message["method"] != "tools/call" {
                    *response.status_mut() = http::StatusCode::ACCEPTED;
                    return Ok::<_, Infallible>(response);
                }
                let (feed, events) = mpsc::unbounded_channel::<Bytes>();
                feed_sender.send(feed).expect("the test is still running");
                let events = stream::unfold(events, async |mut events| {
                    let event = events.recv().await?;
                    Some((Ok::<_, Infallible>(event), events))
                });
                *response.body_mut() = Body::from_stream(events.boxed());
                let headers: &mut HeaderMap = response.headers_mut();
                headers.insert(
                    "content-type",
                    "text/event-stream".parse().expect("a value"),
                );
                Ok(response)
            }
        }));
        let service = service.map_response(|response| response.map(Body::new));
        Self {
            layer,
            log,
            service: BoxCloneSyncService::new(service),
            feeds: feeds.into(),
            open: Vec::new().into(),
            cancels,
            token,
            on_next_request,
        }
    }

    /// Returns the first request's token.
    pub(crate) fn token(&self) -> CallToken {
        self.token
            .lock()
            .unwrap()
            .clone()
            .expect("a request has arrived")
    }

    /// Runs an action when the server receives the next request.
    pub(crate) fn on_next_request(&self, action: impl FnOnce() + Send + 'static) {
        *self.on_next_request.lock().unwrap() = Some(Box::new(action));
    }

    /// Sends a cancellation for a call, as its client would.
    pub(crate) async fn cancel(&self, id: i64) {
        let message = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": id } });
        let request = http::Request::post("/mcp").header("content-type", "application/json");
        let request = request
            .header("mcp-session-id", "s")
            .body(Body::from(message.to_string()));
        let service = self.service.clone();
        let Ok(_accepted) = service.oneshot(request.expect("a request")).await;
    }

    /// Returns the number of cancels that the server has received.
    pub(crate) fn cancels(&self) -> usize {
        self.cancels.load(Ordering::Relaxed)
    }

    /// Sends a call within the session.
    pub(crate) async fn call(&self, id: i64) -> Body {
        self.send_call(id, Some("s"), None).await
    }

    /// Sends a call without a session, and with a protocol `version` if there is one.
    pub(crate) async fn call_without_session(&self, id: i64, version: Option<&str>) -> Body {
        self.send_call(id, None, version).await
    }

    async fn send_call(&self, id: i64, session: Option<&str>, version: Option<&str>) -> Body {
        let message = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": { "name": "t" } });
        let request = http::Request::post("/mcp").header("content-type", "application/json");
        let request = match session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        };
        let request = match version {
            Some(version) => request.header("mcp-protocol-version", version),
            None => request,
        };
        self.send(request, Body::from(message.to_string())).await
    }

    /// Sends a GET in the session that resumes after this event.
    pub(crate) async fn resume(&self, id: impl AsRef<[u8]>) -> Body {
        let request = http::Request::get("/mcp").header("last-event-id", id.as_ref());
        let request = request.header("mcp-session-id", "s");
        self.send(request, Body::empty()).await
    }

    async fn send(&self, request: http::request::Builder, body: Body) -> Body {
        let request = request.body(body);
        let service = self.service.clone();
        let Ok(response) = service.oneshot(request.expect("a request")).await;
        let feed = self.feeds.lock().unwrap().try_recv();
        self.open.lock().unwrap().push(feed.expect("a stream"));
        response.into_body()
    }

    /// Writes to the first stream.
    pub(crate) fn send_event(&self, event: &str) {
        self.write(0, event);
    }

    /// Writes to the newest stream.
    pub(crate) fn send_event_to_newest(&self, event: &str) {
        let last = self.open.lock().unwrap().len() - 1;
        self.write(last, event);
    }

    fn write(&self, nth: usize, event: &str) {
        let open = self.open.lock().unwrap();
        open[nth]
            .send(Bytes::from(event.to_owned()))
            .expect("the stream is read");
    }

    /// Ends the newest stream.
    pub(crate) fn end_newest(&self) {
        self.open.lock().unwrap().pop();
    }

    /// Reads the next frame.
    pub(crate) async fn frame(body: &mut Body) {
        body.frame()
            .await
            .expect("a frame")
            .expect("the body does not fail");
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign").finish_non_exhaustive()
    }
}
