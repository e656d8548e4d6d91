//! A client in the process of its server: it makes requests and takes responses, with no socket between.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower::{Service, ServiceExt};

use crate::{Failure, setup::Server};

/// One session, or none.
pub struct Client {
    server: Server<Full<Bytes>>,
    session: Option<HeaderValue>,
    fields: [(HeaderName, HeaderValue); 5],
}

/// A call that has been answered by the start of a stream.
pub struct Started {
    pub body: Body,
    /// The id of the event that it starts with.
    pub event_id: String,
}

// === impl Client ===

impl Client {
    /// For calls without a session, and for requests that have nothing to do with MCP.
    pub fn stateless(server: Server<Full<Bytes>>) -> Self {
        Self {
            server,
            session: None,
            fields: fields(),
        }
    }

    /// Starts a session.
    pub async fn initialize(server: Server<Full<Bytes>>) -> Result<Self, Failure> {
        let mut client = Self::stateless(server);
        let info = json!({ "name": "bench", "version": "1" });
        let params =
            json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info });
        let message =
            json!({ "jsonrpc": "2.0", "id": "i", "method": "initialize", "params": params });
        let response = client.post(&message).await?;
        let session = response.headers().get("mcp-session-id");
        client.session = session.map(as_parsed);
        response.into_body().collect().await?;
        let message = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.post(&message).await?.into_body().collect().await?;
        Ok(client)
    }

    pub fn server(&self) -> Server<Full<Bytes>> {
        self.server.clone()
    }

    pub fn session(&self) -> Option<&str> {
        self.session.as_ref()?.to_str().ok()
    }

    /// Calls a tool and gives its answer, with the stream around it.
    pub async fn call(&mut self, message: &Value) -> Result<Bytes, Failure> {
        let response = self.post(message).await?;
        Ok(response.into_body().collect().await?.to_bytes())
    }

    /// Calls a tool that does not answer.
    pub async fn start(&mut self, message: &Value) -> Result<Started, Failure> {
        let response = self.post(message).await?;
        first_event(response).await
    }

    /// Comes back for a call.
    pub async fn resume(&mut self, event_id: &str) -> Result<Started, Failure> {
        let mut request = self.request(Method::GET, Bytes::new())?;
        let event_id = HeaderValue::from_str(event_id)?;
        request.headers_mut().insert("last-event-id", event_id);
        let response = self.send(request).await?;
        first_event(response).await
    }

    /// Cancels a call.
    pub async fn cancel(&mut self, id: u64) -> Result<(), Failure> {
        let params = json!({ "requestId": id });
        let method = "notifications/cancelled";
        self.post(&json!({ "jsonrpc": "2.0", "method": method, "params": params }))
            .await?;
        Ok(())
    }

    /// Ends its session.
    pub async fn delete(&mut self) -> Result<(), Failure> {
        let request = self.request(Method::DELETE, Bytes::new())?;
        self.send(request).await?;
        Ok(())
    }

    /// A GET that no MCP server would understand.
    pub async fn plain(&mut self) -> Result<Bytes, Failure> {
        let request = Request::get("http://localhost/")
            .header("host", "localhost")
            .header("user-agent", "bench")
            .body(Full::default())?;
        let response = self.send(request).await?;
        Ok(response.into_body().collect().await?.to_bytes())
    }

    async fn post(&mut self, message: &Value) -> Result<Response<Body>, Failure> {
        let request = self.request(Method::POST, message.to_string().into())?;
        self.send(request).await
    }

    fn request(&self, method: Method, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri("http://localhost/mcp");
        for (name, value) in &self.fields {
            request = request.header(name, value);
        }
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Body>, Failure> {
        let response = self.server.ready().await?.call(request).await?;
        if !response.status().is_success() {
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into());
        }
        Ok(response)
    }
}

/// What every request says.
fn fields() -> [(HeaderName, HeaderValue); 5] {
    [
        (header::HOST, "localhost"),
        (header::CONTENT_TYPE, "application/json"),
        (header::ACCEPT, "application/json, text/event-stream"),
        (header::USER_AGENT, "bench"),
        (
            HeaderName::from_static("mcp-protocol-version"),
            "2025-06-18",
        ),
    ]
    .map(|(name, value)| (name, as_parsed(&HeaderValue::from_static(value))))
}

/// The value as it is in a request that hyper parsed: a part of a buffer that is shared already, so that a clone
/// of it allocates nothing.
fn as_parsed(value: &HeaderValue) -> HeaderValue {
    let buffer = BytesMut::from(value.as_bytes()).freeze();
    HeaderValue::from_maybe_shared(buffer).unwrap_or_else(|_| value.clone())
}

/// A `tools/call`.
pub fn call(id: u64, tool: &str, arguments: Value) -> Value {
    let params = json!({ "name": tool, "arguments": arguments });
    json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params })
}

async fn first_event(response: Response<Body>) -> Result<Started, Failure> {
    let mut body = response.into_body();
    let frame = body.frame().await.ok_or("a stream without events")??;
    let event = frame.into_data().map_err(|_| "trailers, not an event")?;
    let event = std::str::from_utf8(&event)?;
    let id = event.lines().find_map(|line| line.strip_prefix("id:"));
    let event_id = id.ok_or("an event without an id")?.trim().to_owned();
    Ok(Started { body, event_id })
}
