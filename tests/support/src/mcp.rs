//! An MCP client, which adds the protocol's messages and headers to a [`Request`].
//!
//! An [`Mcp`] is plain data. Each method opens a connection of its own, so that a test can disconnect from a single
//! call. The `*_request` methods return the request instead, which can then be sent with [`Connection::send_cut`] or
//! [`H2::send`](super::H2::send), or along with others on one connection.

use std::net::SocketAddr;

use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    client::{Connection, Reply},
    request::Request,
};

/// The default protocol revision, which has sessions.
pub const VERSION: &str = "2025-06-18";

/// The first revision without sessions.
pub const SESSIONLESS: &str = "2026-07-28";

/// A client for one endpoint, with or without a session.
#[derive(Clone, Debug)]
pub struct Mcp {
    addr: SocketAddr,
    path: String,
    version: &'static str,
    session: Option<String>,
    headers: Vec<(String, String)>,
}

/// Returns the messages that open a session at this revision, as plain JSON.
pub fn handshake(version: &str) -> [Value; 2] {
    let initialize = json!({
        "jsonrpc": "2.0", "id": "init", "method": "initialize",
        "params": {
            "protocolVersion": version,
            "capabilities": {},
            "clientInfo": { "name": "support", "version": "0" },
        },
    });
    let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
    [initialize, initialized]
}

// === impl Mcp ===

impl Mcp {
    /// Returns a client that never initializes, for a server that has no sessions.
    pub fn stateless(addr: SocketAddr, path: &str) -> Self {
        Self {
            addr,
            path: path.to_owned(),
            version: VERSION,
            session: None,
            headers: Vec::new(),
        }
    }

    /// Returns a client for revision 2026-07-28.
    ///
    /// It sends its version and method in headers, and its version in `_meta` as well.
    pub fn sessionless(addr: SocketAddr, path: &str) -> Self {
        Self::stateless(addr, path).version(SESSIONLESS)
    }

    /// Returns a client that has opened its own session.
    pub async fn session(addr: SocketAddr, path: &str) -> Self {
        Self::stateless(addr, path).connect().await
    }

    /// Returns the same client for another server.
    pub fn at(&self, addr: SocketAddr) -> Self {
        Self {
            addr,
            ..self.clone()
        }
    }

    /// Uses a session that another client opened.
    pub fn in_session(mut self, id: &str) -> Self {
        self.session = Some(id.to_owned());
        self
    }

    /// Uses another protocol revision.
    pub fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    /// Adds a header to all later requests. On a clone, it does not affect the original.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Opens a session: `initialize`, then `notifications/initialized`.
    pub async fn connect(mut self) -> Self {
        let params = json!({
            "protocolVersion": self.version,
            "capabilities": {},
            "clientInfo": { "name": "support", "version": "0" },
        });
        // Not a number, because the tests choose the ids of their calls.
        let mut connection = self.request("initialize", "initialize", params).await;
        let head = connection.head().await;
        assert_eq!(head.status, 200, "initialize");
        let session = head.header("mcp-session-id").expect("a session id");
        self.session = Some(session.to_owned());
        connection.answer().await.expect("an initialize result");
        let status = self.notify("notifications/initialized", json!({})).await;
        assert_eq!(status, 202, "notifications/initialized");
        self
    }

    /// Returns the protocol revision that its requests specify.
    pub fn revision(&self) -> &str {
        self.version
    }

    /// Returns the session id, if there is one.
    pub fn session_id(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// Sends a `tools/call` on its own connection without reading the response.
    pub async fn call(&self, id: impl Into<Value>, tool: &str, arguments: Value) -> Connection {
        self.open(&self.call_request(id, tool, arguments)).await
    }

    /// Sends a request with any method on its own connection without reading the response.
    pub async fn request(&self, id: impl Into<Value>, method: &str, params: Value) -> Connection {
        let message = self.message(id.into(), method, params);
        self.open(&self.message_request(&message)).await
    }

    /// Sends a notification and returns the status.
    pub async fn notify(&self, method: &str, params: Value) -> u16 {
        let message = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        self.fetch(&self.message_request(&message)).await.status
    }

    /// Sends `notifications/cancelled` for a request and returns the status.
    pub async fn cancel(&self, id: impl Into<Value>) -> u16 {
        let params = json!({ "requestId": id.into(), "reason": "the test cancels" });
        self.notify("notifications/cancelled", params).await
    }

    /// Sends a GET that resumes a stream after an event, without reading the response.
    pub async fn resume(&self, last_event_id: &str) -> Connection {
        self.open(&self.resume_request(last_event_id)).await
    }

    /// Sends a GET for the standalone stream, without reading the response.
    pub async fn listen(&self) -> Connection {
        self.open(&self.get_request()).await
    }

    /// Ends the session with a DELETE and returns the status.
    pub async fn delete(&self) -> u16 {
        let request = self.with_headers(Request::new("DELETE", &self.path));
        self.fetch(&request).await.status
    }

    /// Sends any request on its own connection without reading the response.
    pub async fn send(&self, request: &Request) -> Connection {
        self.open(request).await
    }

    /// Sends any body with the headers for a POST, and reads the whole response.
    pub async fn post_raw(&self, body: impl Into<Bytes>, extra: &[(&str, &str)]) -> Reply {
        let request = self.post_request(body).headers(extra.iter().copied());
        self.fetch(&request).await
    }
}

/// Requests that have not been sent yet.
impl Mcp {
    /// Returns a `tools/call` whose progress token is its id, so progress is sent on its stream.
    pub fn call_request(&self, id: impl Into<Value>, tool: &str, arguments: Value) -> Request {
        self.message_request(&self.call_message(id, tool, arguments))
    }

    /// Returns a `tools/call` message.
    pub fn call_message(&self, id: impl Into<Value>, tool: &str, arguments: Value) -> Value {
        let id = id.into();
        let params = json!({
            "name": tool,
            "arguments": arguments,
            "_meta": { "progressToken": id },
        });
        self.message(id, "tools/call", params)
    }

    /// Returns a POST with a JSON-RPC message.
    pub fn message_request(&self, message: &Value) -> Request {
        let request = self.post_request(message.to_string());
        match message["method"].as_str() {
            Some(method) if self.version >= SESSIONLESS => {
                let request = request.header("mcp-method", method);
                match message["params"]["name"].as_str() {
                    Some(name) => request.header("mcp-name", name),
                    None => request,
                }
            }
            _ => request,
        }
    }

    /// Returns a POST with any body.
    pub fn post_request(&self, body: impl Into<Bytes>) -> Request {
        let request = Request::new("POST", &self.path)
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .body(body);
        self.with_headers(request)
    }

    /// Returns a GET that resumes a stream after an event.
    pub fn resume_request(&self, last_event_id: &str) -> Request {
        self.get_request().header("last-event-id", last_event_id)
    }

    /// Returns a GET for the standalone stream.
    pub fn get_request(&self) -> Request {
        self.with_headers(Request::new("GET", &self.path).header("accept", "text/event-stream"))
    }

    fn message(&self, id: Value, method: &str, mut params: Value) -> Value {
        if self.version >= SESSIONLESS {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!(self.version);
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
        }
        json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
    }

    /// Adds the headers that every request has.
    fn with_headers(&self, request: Request) -> Request {
        let request = request.header("mcp-protocol-version", self.version);
        let request = match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        };
        let extra = self.headers.iter().map(|(name, value)| (&**name, &**value));
        request.headers(extra)
    }

    async fn open(&self, request: &Request) -> Connection {
        let mut connection = Connection::open(self.addr).await;
        connection.send(request).await;
        connection
    }

    async fn fetch(&self, request: &Request) -> Reply {
        Connection::fetch(self.addr, request).await
    }
}
