//! An MCP client that can disconnect in several ways, over a socket or in process.
//!
//! Every call has its own connection, so that a single call can be abandoned.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Method, Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use strum::EnumIter;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tower::{Service, ServiceExt};

use crate::setup::{Mode, Server};

/// The header that carries the number of the call a request belongs to.
pub const CALL: &str = "x-call";

const SESSION: &str = "mcp-session-id";

const VERSION: &str = "2025-06-18";

/// Timeout for any operation, far longer than one should ever take.
const LIMIT: Duration = Duration::from_secs(120);

/// Ends a chunked body while keeping the connection open.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// How to reach the server.
#[derive(Clone)]
pub enum Transport {
    Direct(Server<Full<Bytes>>),
    Socket(SocketAddr),
}

/// A client with one session, or without sessions.
#[derive(Clone)]
pub struct Client {
    transport: Transport,
    session: Option<HeaderValue>,
    fields: [(HeaderName, HeaderValue); 5],
}

/// A response, and what has been read from it so far.
pub struct Stream {
    source: Source,
    seen: Vec<u8>,
}

/// The id of the session that a response opened.
type Opened = Option<HeaderValue>;

/// How a disconnect looks to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter)]
pub enum Close {
    Fin,
    Rst,
}

enum Source {
    Body(Body),
    Socket(TcpStream),
}

/// Returns a `tools/call` request.
pub fn call(id: usize, tool: &str, arguments: Value) -> Value {
    let params = json!({ "name": tool, "arguments": arguments });
    json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params })
}

/// Returns a `ping`, which the server answers unless it is blocked.
pub fn ping() -> Value {
    json!({ "jsonrpc": "2.0", "id": "p", "method": "ping" })
}

// === impl Client ===

impl Client {
    /// Creates a client without a session.
    pub fn new(transport: Transport) -> Self {
        let (session, fields) = (None, fields());
        Self {
            transport,
            session,
            fields,
        }
    }

    /// Creates a client, with a session if the mode has sessions.
    pub async fn open(transport: Transport, mode: Mode) -> Result<Self> {
        let mut client = Self::new(transport);
        if mode == Mode::Stateless {
            return Ok(client);
        }
        let info = json!({ "name": "bench", "version": "1" });
        let params = json!({ "protocolVersion": VERSION, "capabilities": {}, "clientInfo": info });
        let message =
            json!({ "jsonrpc": "2.0", "id": "i", "method": "initialize", "params": params });
        let (opened, mut stream) = client.send(client.post(&message)?).await?;
        stream.until("\"result\"").await?;
        while stream.read().await? {}
        client.session = Some(as_parsed(&opened.context("no session")?));
        let message = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.send(client.post(&message)?).await?;
        Ok(client)
    }

    /// Opens `count` clients, one after another.
    pub async fn open_many(transport: &Transport, mode: Mode, count: usize) -> Result<Vec<Self>> {
        let mut clients = Vec::new();
        for _ in 0..count {
            clients.push(Self::open(transport.clone(), mode).await?);
        }
        Ok(clients)
    }

    pub fn transport(&self) -> &Transport {
        &self.transport
    }

    pub fn session(&self) -> Option<&str> {
        self.session.as_ref()?.to_str().ok()
    }

    /// Calls a tool, with `number` as the request id too. Returns once the answer has started.
    ///
    /// In a session, the first event id has been read by then, so the client can resume from it.
    pub async fn begin(
        &self,
        number: usize,
        tool: &str,
        arguments: Value,
    ) -> Result<(Stream, Option<String>)> {
        let mut request = self.post(&call(number, tool, arguments))?;
        request.headers_mut().insert(CALL, number.into());
        let (_, mut stream) = self.send(request).await?;
        let event = match self.session {
            Some(_) => Some(stream.event_id().await?),
            None => None,
        };
        Ok((stream, event))
    }

    /// Resumes after an event.
    pub async fn resume(&self, event: &str) -> Result<Stream> {
        Ok(self.send(self.get(event)?).await?.1)
    }

    pub async fn ping(&self) -> Result<()> {
        let (_, mut stream) = self.send(self.post(&ping())?).await?;
        stream.until("\"result\"").await
    }

    /// Creates a request with any message.
    pub fn post(&self, message: &Value) -> Result<Request<Full<Bytes>>> {
        self.request(Method::POST, message.to_string().into())
    }

    /// Creates a request that resumes after an event.
    pub fn get(&self, event: &str) -> Result<Request<Full<Bytes>>> {
        let mut request = self.request(Method::GET, Bytes::new())?;
        let event = HeaderValue::from_str(event)?;
        request.headers_mut().insert("last-event-id", event);
        Ok(request)
    }

    pub fn request(&self, method: Method, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let request = Request::builder().method(method);
        let mut request = request.uri("http://localhost/mcp");
        for (name, value) in &self.fields {
            request = request.header(name, value);
        }
        if let Some(session) = &self.session {
            request = request.header(SESSION, session);
        }
        Ok(request.body(Full::new(body))?)
    }

    /// Sends a request to a server in this process.
    ///
    /// # Errors
    ///
    /// Fails if the client uses sockets, or unless the status is a success.
    pub async fn direct(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Body>> {
        let Transport::Direct(server) = &mut self.transport else {
            bail!("not in this process");
        };
        let response = server.ready().await?.call(request).await?;
        ensure!(response.status().is_success(), "{}", response.status());
        Ok(response)
    }

    /// Sends a request to a server in this process and reads the answer in full.
    pub async fn ask(&mut self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        let response = self.direct(request).await?;
        Ok(response.into_body().collect().await?.to_bytes())
    }

    /// Sends a request and reads the response head, within [`LIMIT`].
    ///
    /// # Errors
    ///
    /// Fails if the status is not a success.
    async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<(Opened, Stream)> {
        let send = async {
            let Transport::Socket(address) = self.transport else {
                // Copies the values, because those read from a socket are not shared with other requests either.
                for value in request.headers_mut().values_mut() {
                    *value = HeaderValue::from_bytes(value.as_bytes())?;
                }
                let response = self.clone().direct(request).await?;
                let opened = response.headers().get(SESSION).cloned();
                return Ok((opened, Stream::new(Source::Body(response.into_body()))));
            };
            let mut stream = Stream::connect(address).await?;
            stream.write(&wire(request).await?).await?;
            stream.until("\r\n\r\n").await?;
            Ok((opened(&stream.text())?, stream))
        };
        tokio::time::timeout(LIMIT, send).await?
    }
}

/// Returns the headers that every request has.
fn fields() -> [(HeaderName, HeaderValue); 5] {
    [
        // rmcp accepts this host, whatever the address.
        (header::HOST, "localhost"),
        (header::CONTENT_TYPE, "application/json"),
        (header::ACCEPT, "application/json, text/event-stream"),
        (header::USER_AGENT, "bench"),
        (HeaderName::from_static("mcp-protocol-version"), VERSION),
    ]
    .map(|(name, value)| (name, as_parsed(&HeaderValue::from_static(value))))
}

/// Rebuilds the value the way hyper's parser does, as a slice of a shared buffer.
///
/// Cloning such a value does not allocate.
fn as_parsed(value: &HeaderValue) -> HeaderValue {
    let buffer = BytesMut::from(value.as_bytes()).freeze();
    HeaderValue::from_maybe_shared(buffer).unwrap_or_else(|_| value.clone())
}

/// Encodes a request as HTTP/1.1.
pub async fn wire(request: Request<Full<Bytes>>) -> Result<Vec<u8>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut bytes = format!("{} {} HTTP/1.1\r\n", head.method, head.uri.path()).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// Parses a response head. Returns the session id, or an error unless the status is a success.
fn opened(head: &str) -> Result<Opened> {
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    ensure!(status.starts_with("HTTP/1.1 2"), "{status}");
    let mut fields = lines.filter_map(|line| line.split_once(": "));
    let session = fields.find(|(name, _)| *name == SESSION);
    Ok(session.map(|(_, id)| id.parse()).transpose()?)
}

// === impl Stream ===

impl Stream {
    /// Opens a connection.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        Ok(Self::new(Source::Socket(socket)))
    }

    fn new(source: Source) -> Self {
        let seen = Vec::new();
        Self { source, seen }
    }

    /// Sends a request on this keep-alive connection and reads the answer in full.
    ///
    /// # Errors
    ///
    /// Fails if the answer is incomplete or does not contain `wanted`.
    pub async fn exchange(&mut self, request: &[u8], wanted: &str) -> Result<()> {
        self.seen.clear();
        self.write(request).await?;
        while self.read().await? {}
        let is_right = self.seen.ends_with(LAST_CHUNK) && contains(&self.seen, wanted.as_bytes());
        ensure!(is_right, "wrong answer: {}", self.text());
        Ok(())
    }

    /// Reads until `wanted` has arrived, for up to `LIMIT`. Fails if the answer ends first.
    pub async fn until(&mut self, wanted: &str) -> Result<()> {
        tokio::time::timeout(LIMIT, self.wait_for(wanted)).await?
    }

    /// Reads until `wanted` has arrived. Fails if the answer ends first.
    pub async fn wait_for(&mut self, wanted: &str) -> Result<()> {
        while !contains(&self.seen, wanted.as_bytes()) {
            ensure!(self.read().await?, "ended without {wanted:?}");
        }
        Ok(())
    }

    /// Reads until there is an event id that the client can resume from.
    async fn event_id(&mut self) -> Result<String> {
        self.until("\nid: ").await?;
        // A blank line completes the event.
        self.until("\n\n").await?;
        let text = self.text();
        let mut ids = text.lines().filter_map(|line| line.strip_prefix("id: "));
        Ok(ids.next_back().context("no event id")?.trim().to_owned())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Drops what has been read, and frees its memory.
    pub fn forget(&mut self) {
        self.seen = Vec::new();
    }

    /// Prepares the stream so that dropping it closes the connection in this way.
    ///
    /// Does nothing if the server is in this process.
    pub fn before_close(&mut self, close: Close) -> Result<()> {
        match (&self.source, close) {
            (Source::Socket(socket), Close::Fin) => {
                // The kernel sends an RST if any unread data is left.
                let mut unread = [0; 4096];
                while socket.try_read(&mut unread).is_ok_and(|read| read > 0) {}
            }
            (Source::Socket(socket), Close::Rst) => socket.set_zero_linger()?,
            (Source::Body(_), _) => {}
        }
        Ok(())
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.source {
            Source::Socket(socket) => Ok(socket.write_all(bytes).await?),
            Source::Body(_) => bail!("a body is not written to"),
        }
    }

    /// Reads more of the answer. Returns `false` once it has ended.
    async fn read(&mut self) -> Result<bool> {
        match &mut self.source {
            Source::Body(body) => {
                let frame = body.frame().await.transpose()?;
                if let Some(data) = frame.as_ref().and_then(Frame::data_ref) {
                    self.seen.extend_from_slice(data);
                }
                Ok(frame.is_some())
            }
            Source::Socket(_) if self.seen.ends_with(LAST_CHUNK) => Ok(false),
            Source::Socket(socket) => Ok(socket.read_buf(&mut self.seen).await? > 0),
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
    fn a_session_id_is_read_and_a_refusal_is_an_error() {
        let session = opened("HTTP/1.1 200 OK\r\nmcp-session-id: 7\r\n\r\nbody").unwrap();
        assert_eq!(session.unwrap(), "7");
        let refused = opened("HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err();
        assert_eq!(refused.to_string(), "HTTP/1.1 404 Not Found");
    }

    #[tokio::test]
    async fn a_request_has_its_body_after_the_blank_line() {
        let request = Request::post("http://localhost/mcp").header("host", "localhost");
        let request = request.body(Full::from("{}")).unwrap();
        let bytes = wire(request).await.unwrap();
        let head = "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n";
        assert_eq!(String::from_utf8(bytes).unwrap(), format!("{head}{{}}"));
    }
}
