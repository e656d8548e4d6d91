//! A client that needs no socket.

use std::io;

use axum::body::Body;
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, Request, Response, StatusCode, request};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use mcp_cancel_proxy::stdio::{Options, Stdio};
use serde_json::Value;
use tokio::{sync::oneshot, time::timeout};
use tower::{Layer as _, Service as _, ServiceExt as _};

use crate::server::{LIMIT, serve};

/// A revision whose clients support priming events.
pub const WITH_PRIMING: &str = "2025-11-25";
/// A revision whose clients do not support priming events.
pub const WITHOUT_PRIMING: &str = "2025-06-18";

pub const NOTIFICATION: &str = r#"{"jsonrpc":"2.0","method":"x"}"#;

/// A client with a session on the service.
pub struct Client {
    pub stdio: Stdio,
    pub session: String,
}

pub struct Events {
    body: Body,
    text: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub id: Option<String>,
    pub data: String,
}

/// Returns a POST like those the SDKs send.
pub fn post() -> request::Builder {
    Request::post("/mcp")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
}

pub async fn send(stdio: &Stdio, request: Request<Body>) -> Response<Body> {
    let answer = stdio.clone().call(request);
    let Ok(response) = timeout(LIMIT, answer).await.expect("no response");
    response
}

pub async fn json(response: Response<Body>) -> Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

/// Returns an `initialize` from a client that requests this revision.
pub fn initialize(revision: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":0,"method":"initialize","params":{{"protocolVersion":"{revision}","capabilities":{{}},"clientInfo":{{"name":"test","version":"0"}}}}}}"#
    )
}

/// Requests a session and returns the response.
pub async fn begin(stdio: &Stdio) -> Response<Body> {
    send(
        stdio,
        post().body(initialize(WITHOUT_PRIMING).into()).unwrap(),
    )
    .await
}

/// Asserts that no session has been started, and that the client may retry after this many seconds.
pub fn assert_refused(response: &Response<Body>, seconds: &str) {
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], seconds);
}

impl Client {
    /// Opens a session on a server with these options, and also returns the id of its process.
    pub async fn with_process(options: Options) -> (Self, i32) {
        let client = Self::begin(&serve(options), WITHOUT_PRIMING).await;
        let pid = client.pid().await;
        (client, pid)
    }

    /// Opens a session and waits until the server has answered.
    pub async fn begin(stdio: &Stdio, revision: &str) -> Self {
        let (client, mut events) = Self::initialize(stdio, revision).await;
        let answer = events.answer().await;
        assert!(answer["result"].is_object(), "{answer}");
        assert_eq!(
            client
                .notify(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#)
                .await,
            StatusCode::ACCEPTED
        );
        client
    }

    /// Opens a session without waiting for the answer.
    pub async fn initialize(stdio: &Stdio, revision: &str) -> (Self, Events) {
        let response = send(stdio, post().body(initialize(revision).into()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        let session = response.headers()["mcp-session-id"]
            .to_str()
            .unwrap()
            .to_owned();
        assert_eq!(session.len(), 32);
        (
            Self {
                stdio: stdio.clone(),
                session,
            },
            Events::of(response),
        )
    }

    pub async fn post(&self, body: impl Into<Body>) -> Response<Body> {
        send(
            &self.stdio,
            post()
                .header("mcp-session-id", &self.session)
                .body(body.into())
                .unwrap(),
        )
        .await
    }

    /// Sends a body whose second half is held back until `meanwhile` is done, and returns both results.
    pub async fn post_slowly<T>(
        &self,
        body: &str,
        meanwhile: impl Future<Output = T>,
    ) -> (StatusCode, T) {
        let (first, second) = body.split_at(body.len() / 2);
        let (first, second) = (first.to_owned(), second.to_owned());
        let (send_second, is_sent) = oneshot::channel();
        let second = async { is_sent.await.map(|()| second).map_err(io::Error::other) };
        let body = stream::iter([Ok(first)]).chain(stream::once(second));
        tokio::join!(self.notify(Body::from_stream(body)), async {
            let result = meanwhile.await;
            send_second.send(()).unwrap();
            result
        })
    }

    /// Sends a body through a layer that cancels the call as soon as the response is dropped.
    pub async fn post_through_layer(&self, body: &'static str) -> Response<impl Sized> {
        let inner = self.stdio.clone();
        let inner = inner.map_request(|request: Request<_>| request.map(Body::new));
        let request = post().header("mcp-session-id", &self.session);
        let request = request.body(Body::from(body)).unwrap();
        let layer = CancelOnDisconnectLayer::new();
        layer.layer(inner).oneshot(request).await.unwrap()
    }

    pub async fn request(&self, body: impl Into<Body>) -> Events {
        let response = self.post(body).await;
        assert_eq!(response.status(), StatusCode::OK);
        Events::of(response)
    }

    pub async fn call(&self, id: &str, tool: &str, arguments: &str) -> Events {
        self.request(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments},"_meta":{{"progressToken":{id}}}}}}}"#)).await
    }

    /// Calls a tool and waits for its answer.
    pub async fn text(&self, tool: &str, arguments: &str) -> String {
        let answer = self.call("\"text\"", tool, arguments).await.answer().await;
        answer["result"]["content"][0]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_owned()
    }

    pub async fn pid(&self) -> i32 {
        self.text("pid", "{}").await.parse().unwrap()
    }

    /// Sends a notification or an answer.
    pub async fn notify(&self, body: impl Into<Body>) -> StatusCode {
        self.post(body).await.status()
    }

    pub async fn cancel(&self, id: &str) -> StatusCode {
        self.notify(format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#)).await
    }

    /// Opens the standalone stream, or resumes after an event.
    pub async fn get(&self, last: Option<&str>) -> Response<Body> {
        let mut request = Request::get("/mcp")
            .header("accept", "text/event-stream")
            .header("mcp-session-id", &self.session);
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        send(&self.stdio, request.body(Body::empty()).unwrap()).await
    }

    pub async fn delete(&self) -> StatusCode {
        let request = Request::delete("/mcp").header("mcp-session-id", &self.session);
        send(&self.stdio, request.body(Body::empty()).unwrap())
            .await
            .status()
    }
}

impl Events {
    pub fn of(response: Response<Body>) -> Self {
        let headers: &HeaderMap = response.headers();
        assert_eq!(headers["content-type"], "text/event-stream");
        Self {
            body: response.into_body(),
            text: String::new(),
        }
    }

    /// Returns the next event, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let lines: Vec<_> = event
                    .lines()
                    .filter_map(|line| line.split_once(": ").or_else(|| line.split_once(':')))
                    .collect();
                let field = |name: &str| {
                    lines
                        .iter()
                        .find(|(key, _)| *key == name)
                        .map(|(_, value)| (*value).to_owned())
                };
                let event = Event {
                    id: field("id"),
                    data: field("data").unwrap_or_default(),
                };
                self.text = rest.to_owned();
                return Some(event);
            }
            let frame = timeout(LIMIT, self.body.frame()).await.expect("no event")?;
            let bytes = frame.unwrap().into_data().unwrap();
            self.text.push_str(str::from_utf8(&bytes).unwrap());
        }
    }

    /// Returns the next event whose message contains this text.
    pub async fn event_with(&mut self, text: &str) -> Event {
        loop {
            let event = self.next().await.expect("the stream has ended");
            if event.data.contains(text) {
                return event;
            }
        }
    }

    pub async fn message(&mut self) -> String {
        loop {
            let event = self.next().await.expect("the stream has ended");
            if !event.data.is_empty() {
                return event.data;
            }
        }
    }

    /// Returns the next message that is not a notification.
    pub async fn answer(&mut self) -> Value {
        loop {
            let message: Value = serde_json::from_str(&self.message().await).unwrap();
            if message.get("id").is_some() {
                return message;
            }
        }
    }

    /// Returns all remaining messages.
    pub async fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        while let Some(event) = self.next().await {
            if !event.data.is_empty() {
                rest.push(event.data);
            }
        }
        rest
    }
}
