//! An MCP client that can hang up in every way, over a socket or in process.
//!
//! A call has a connection of its own, so that it can be given up alone.

use std::{net::SocketAddr, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tower::ServiceExt;

use crate::{
    Failure,
    setup::{Mode, Server},
    sockets::serve::CALL,
};

const VERSION: &str = "2025-06-18";

/// How long anything may take before it is given up. Far more than it takes.
const LIMIT: Duration = Duration::from_secs(120);

/// How a server is reached.
#[derive(Clone)]
pub enum Way {
    Direct(Server<Body>),
    Socket(SocketAddr),
}

#[derive(Clone)]
pub struct Client {
    way: Way,
    session: Option<String>,
}

/// A response, as far as it was read.
pub struct Stream {
    source: Source,
    seen: Vec<u8>,
}

enum Source {
    Body(Body),
    Socket(TcpStream),
}

// === impl Client ===

impl Client {
    /// Opens a session, where there are any.
    pub async fn open(way: Way, mode: Mode) -> Result<Self, Failure> {
        let mut client = Self { way, session: None };
        if mode == Mode::Stateless {
            return Ok(client);
        }
        let params = json!({
            "protocolVersion": VERSION, "capabilities": {}, "clientInfo": { "name": "bench", "version": "1" },
        });
        let message =
            json!({ "jsonrpc": "2.0", "id": "i", "method": "initialize", "params": params });
        let (headers, mut stream) = client.send(client.post(&message)?).await?;
        let session = headers.get("mcp-session-id").ok_or("no session")?;
        client.session = Some(session.to_str()?.to_owned());
        stream.until("\"result\"").await?;
        let message = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.send(client.post(&message)?).await?;
        Ok(client)
    }

    pub fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// Calls a tool; `number` is the id as well. The answer has begun when this returns.
    pub async fn call(
        &self,
        number: usize,
        tool: &str,
        arguments: Value,
    ) -> Result<Stream, Failure> {
        let mut request = self.post(&call_message(number, tool, arguments))?;
        request.headers_mut().insert(CALL, number.into());
        Ok(self.send(request).await?.1)
    }

    /// Comes back for what follows an event.
    pub async fn resume(&self, event: &str) -> Result<Stream, Failure> {
        let request = self.request("GET").header("last-event-id", event);
        Ok(self.send(request.body(Full::default())?).await?.1)
    }

    /// Asks whether the server is there.
    pub async fn ping(&self) -> Result<(), Failure> {
        let message = json!({ "jsonrpc": "2.0", "id": "p", "method": "ping" });
        let (_, mut stream) = self.send(self.post(&message)?).await?;
        stream.until("\"result\"").await
    }

    /// A request with any message.
    pub fn post(&self, message: &Value) -> Result<Request<Full<Bytes>>, Failure> {
        let body = Bytes::from(message.to_string());
        let request = self.request("POST").header("content-length", body.len());
        Ok(request.body(Full::new(body))?)
    }

    fn request(&self, method: &str) -> http::request::Builder {
        let mut request = Request::builder()
            .method(method)
            .uri("/mcp")
            // What rmcp lets in, whatever the address.
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", VERSION);
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        request
    }

    /// Sends a request, and reads the head.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<(HeaderMap, Stream), Failure> {
        tokio::time::timeout(LIMIT, self.send_unlimited(request)).await?
    }

    async fn send_unlimited(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(HeaderMap, Stream), Failure> {
        let address = match &self.way {
            Way::Direct(server) => {
                let request = request.map(Body::new);
                let response = server.clone().oneshot(request).await?;
                let (head, body) = response.into_parts();
                if !head.status.is_success() {
                    return Err(head.status.to_string().into());
                }
                return Ok((head.headers, Stream::new(Source::Body(body))));
            }
            Way::Socket(address) => *address,
        };
        let mut socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        socket.write_all(&wire(request).await?).await?;
        let mut stream = Stream::new(Source::Socket(socket));
        stream.until("\r\n\r\n").await?;
        let headers = head(&stream.text())?;
        Ok((headers, stream))
    }
}

/// A `tools/call`.
pub fn call_message(number: usize, tool: &str, arguments: Value) -> Value {
    let params = json!({ "name": tool, "arguments": arguments });
    json!({ "jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params })
}

/// A request as HTTP/1.1.
pub async fn wire(request: Request<Full<Bytes>>) -> Result<Vec<u8>, Failure> {
    let (head, body) = request.into_parts();
    let mut bytes = format!("{} {} HTTP/1.1\r\n", head.method, head.uri).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body.collect().await?.to_bytes());
    Ok(bytes)
}

/// The headers at the start of a response, unless it is a refusal.
fn head(text: &str) -> Result<HeaderMap, Failure> {
    let (head, _) = text.split_once("\r\n\r\n").ok_or("no head")?;
    let (status, fields) = head.split_once("\r\n").unwrap_or((head, ""));
    if !status.starts_with("HTTP/1.1 2") {
        return Err(status.into());
    }
    let mut headers = HeaderMap::new();
    for (name, value) in fields.lines().filter_map(|line| line.split_once(": ")) {
        headers.insert(http::HeaderName::try_from(name)?, value.parse()?);
    }
    Ok(headers)
}

// === impl Stream ===

impl Stream {
    fn new(source: Source) -> Self {
        let seen = Vec::new();
        Self { source, seen }
    }

    /// Reads on until this has come, which must not take long.
    pub async fn until(&mut self, wanted: &str) -> Result<(), Failure> {
        tokio::time::timeout(LIMIT, self.wait_for(wanted)).await?
    }

    /// Reads on until this has come.
    pub async fn wait_for(&mut self, wanted: &str) -> Result<(), Failure> {
        while !contains(&self.seen, wanted.as_bytes()) {
            if !self.read().await? {
                return Err(format!("ended without {wanted:?}").into());
            }
        }
        Ok(())
    }

    /// Reads on until there is an event id that the client can come back with.
    pub async fn event_id(&mut self) -> Result<String, Failure> {
        self.until("\nid: ").await?;
        // The event is complete with its blank line.
        self.until("\n\n").await?;
        let text = self.text();
        let mut ids = text.lines().filter_map(|line| line.strip_prefix("id: "));
        Ok(ids.next_back().ok_or("no event id")?.trim().to_owned())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Forgets what was read, and its memory.
    pub fn forget(&mut self) {
        self.seen = Vec::new();
    }

    /// Takes what has come, so that the kernel has no reason to close with an RST.
    pub fn drain(&mut self) {
        if let Source::Socket(socket) = &self.source {
            let mut unread = [0; 4096];
            while socket.try_read(&mut unread).is_ok_and(|read| read > 0) {}
        }
    }

    /// Has it close with an RST.
    pub fn reset_when_closed(&self) -> Result<(), Failure> {
        match &self.source {
            Source::Socket(socket) => Ok(socket.set_zero_linger()?),
            Source::Body(_) => Ok(()),
        }
    }

    /// Hangs up, with a FIN unless an RST was asked for.
    pub fn close(self) {}

    /// Whether there was more.
    async fn read(&mut self) -> Result<bool, Failure> {
        match &mut self.source {
            Source::Body(body) => match body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.seen.extend_from_slice(&data);
                    }
                    Ok(true)
                }
                None => Ok(false),
            },
            Source::Socket(socket) => {
                // The last chunk of a body; the connection stays open.
                if self.seen.ends_with(b"\r\n0\r\n\r\n") {
                    return Ok(false);
                }
                Ok(socket.read_buf(&mut self.seen).await? > 0)
            }
        }
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|part| part == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_and_a_refusal_is_an_error() {
        let headers = head("HTTP/1.1 200 OK\r\nmcp-session-id: 7\r\n\r\nbody").unwrap();
        assert_eq!(headers["mcp-session-id"], "7");
        let refused = head("HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err();
        assert_eq!(refused.to_string(), "HTTP/1.1 404 Not Found");
    }

    #[tokio::test]
    async fn a_request_has_its_body_behind_the_blank_line() {
        let request = Request::post("/mcp")
            .header("host", "localhost")
            .body(Full::new(Bytes::from_static(b"{}")))
            .unwrap();
        let bytes = wire(request).await.unwrap();
        assert_eq!(bytes, b"POST /mcp HTTP/1.1\r\nhost: localhost\r\n\r\n{}");
    }
}
