//! A hand-written HTTP/1.1 client that can send half a body, reset or half-close.
//!
//! Each [`Connection`] is one TCP connection, which can carry several requests in turn. Responses are read in order,
//! each with [`Connection::head`] followed by one or more of the body readers, which continue where the previous one
//! stopped. All reads are cancel safe.

use std::{collections::VecDeque, io::Read as _, net::SocketAddr, time::Duration};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use serde_json::Value;
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

use super::{
    body::{BodyDecoder, Decoded},
    head,
    limit::within,
    request::{Announced, Request},
    sse::{SseEvent, SseItem, SseReader},
};

/// One TCP connection to the server.
///
/// If it is dropped, the kernel chooses how to close it; the methods that consume it force a FIN or an RST.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    addr: SocketAddr,
    received: BytesMut,
    is_closed: bool,
    /// The methods of the requests whose response heads are still unread.
    ///
    /// They matter because a response to HEAD has no body.
    methods: VecDeque<&'static str>,
    /// The latest response head, and the decoder of its body.
    head: Option<Head>,
    body: BodyDecoder,
    sse: SseReader,
}

/// A response's status and headers.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status code.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, with its transfer coding removed.
    pub body: Vec<u8>,
}

// === impl Connection ===

impl Connection {
    /// Connects to a server.
    pub async fn open(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("connect");
        Self::over(stream, addr)
    }

    /// Connects with a small receive buffer.
    ///
    /// The server soon stalls if the client stops reading.
    pub async fn open_with_receive_buffer(addr: SocketAddr, bytes: u32) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket
            .set_recv_buffer_size(bytes)
            .expect("set the receive buffer");
        let stream = socket.connect(addr).await.expect("connect");
        Self::over(stream, addr)
    }

    /// Sends one request on a connection of its own.
    pub async fn sending(addr: SocketAddr, request: &Request) -> Self {
        let mut connection = Self::open(addr).await;
        connection.send(request).await;
        connection
    }

    /// Sends one request on a connection of its own and reads the whole response.
    pub async fn fetch(addr: SocketAddr, request: &Request) -> Reply {
        Self::sending(addr, request).await.reply().await
    }

    fn over(stream: TcpStream, addr: SocketAddr) -> Self {
        stream.set_nodelay(true).expect("set TCP_NODELAY");
        Self {
            stream,
            addr,
            received: BytesMut::new(),
            is_closed: false,
            methods: VecDeque::new(),
            head: None,
            body: BodyDecoder::empty(),
            sse: SseReader::default(),
        }
    }
}

/// Writing.
impl Connection {
    /// Sends a whole request with a `content-length`.
    pub async fn send(&mut self, request: &Request) {
        self.send_head(request, Announced::Length(request.body.len()))
            .await;
        self.write(&request.body).await;
    }

    /// Sends a request that announces `length` bytes but has only part of its body.
    ///
    /// The rest can be sent with [`write`](Self::write).
    pub async fn send_cut(&mut self, request: &Request, length: usize) {
        assert!(length > request.body.len(), "nothing is left to send");
        self.send_head(request, Announced::Length(length)).await;
        self.write(&request.body).await;
    }

    /// Sends a request in chunks of these sizes, with the rest of the body in a final chunk.
    pub async fn send_chunked(&mut self, request: &Request, sizes: &[usize]) {
        self.send_chunked_head(request).await;
        let mut left = request.body.clone();
        for &size in sizes {
            self.chunk(&left.split_to(size)).await;
        }
        if !left.is_empty() {
            self.chunk(&left).await;
        }
        self.end_chunks().await;
    }

    /// Sends only the head of a request whose body is then sent with [`chunk`](Self::chunk).
    pub async fn send_chunked_head(&mut self, request: &Request) {
        self.send_head(request, Announced::Chunked).await;
    }

    /// Sends one chunk, which must not be empty because that would end the body.
    pub async fn chunk(&mut self, data: &[u8]) {
        assert!(!data.is_empty(), "an empty chunk would end the body");
        let size = format!("{:x}\r\n", data.len());
        self.write(&[size.as_bytes(), data, b"\r\n"].concat()).await;
    }

    /// Ends a chunked body.
    pub async fn end_chunks(&mut self) {
        self.write(b"0\r\n\r\n").await;
    }

    /// Writes raw bytes.
    pub async fn write(&mut self, bytes: &[u8]) {
        within("the server to read", self.stream.write_all(bytes))
            .await
            .expect("the connection is still open");
    }

    async fn send_head(&mut self, request: &Request, announced: Announced) {
        self.methods.push_back(request.method);
        let head = request.head(&self.addr.to_string(), announced);
        self.write(head.as_bytes()).await;
    }
}

/// Reading.
impl Connection {
    /// Reads the next response head. The previous body must have been read in full.
    pub async fn head(&mut self) -> Head {
        self.try_head()
            .await
            .expect("the connection closed before the response")
    }

    /// Reads the next response head, or returns `None` if the server closes the connection.
    pub async fn try_head(&mut self) -> Option<Head> {
        assert!(
            self.is_complete(),
            "the previous body has not been read in full"
        );
        let head = loop {
            if let Some(head) = Head::take(&mut self.received) {
                break head;
            }
            if !self.receive().await {
                return None;
            }
        };
        self.body = match self.methods.pop_front() {
            Some("HEAD") => BodyDecoder::empty(),
            _ => BodyDecoder::new(head.status, &head.headers),
        };
        self.sse = SseReader::default();
        self.head = Some(head.clone());
        Some(head)
    }

    /// Returns the next piece of the body, split as it was by the transfer coding.
    ///
    /// Returns `None` at the end, even if the body is incomplete.
    pub async fn data(&mut self) -> Option<Bytes> {
        loop {
            match self.body.decode(&mut self.received) {
                Decoded::Data(data) => return Some(data),
                Decoded::End => return None,
                Decoded::More if self.receive().await => {}
                Decoded::More => return None,
            }
        }
    }

    /// Returns the next event or comment in the body, or `None` at the end.
    pub async fn item(&mut self) -> Option<SseItem> {
        loop {
            if let Some(item) = self.sse.pop() {
                return Some(item);
            }
            let data = self.data().await?;
            self.sse.push(&data);
        }
    }

    /// Returns the next event in the body, skipping comments, or `None` at the end.
    pub async fn event(&mut self) -> Option<SseEvent> {
        loop {
            if let SseItem::Event(event) = self.item().await? {
                return Some(event);
            }
        }
    }

    /// Reads the rest of the body.
    pub async fn body_to_end(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        while let Some(data) = self.data().await {
            body.extend_from_slice(&data);
        }
        body
    }

    /// Reads up to the JSON-RPC response, whether it is sent as an event or as the body.
    ///
    /// Returns `None` if the stream ends without a response, or if the body is not JSON. Reads the head first if that
    /// has not been done yet. Priming events, notifications and the server's own requests are skipped.
    pub async fn answer(&mut self) -> Option<Value> {
        if self.is_complete() && !self.methods.is_empty() {
            self.head().await;
        }
        let head = self.head.clone().expect("a request has been sent");
        if head.is_event_stream() {
            return self.answer_event().await.map(|event| event.json());
        }
        let body = self.body_to_end().await;
        serde_json::from_slice(&body).ok()
    }

    /// Reads up to the response and asserts that it is from the held tool with this label.
    pub async fn assert_done(&mut self, label: &str) {
        let answer = self.answer().await;
        let answer = answer.unwrap_or_else(|| panic!("no answer to {label:?}"));
        let text = &answer["result"]["content"][0]["text"];
        assert_eq!(*text, format!("done:{label}"));
    }

    /// Reads all messages in the response, whether they are events or a single JSON body.
    ///
    /// Asserts that the response is complete. Reads the head first if it is still unread.
    pub async fn messages(&mut self) -> Vec<Value> {
        if self.is_complete() && !self.methods.is_empty() {
            self.head().await;
        }
        let head = self.head.clone().expect("a request has been sent");
        if !head.is_event_stream() {
            let body = self.body_to_end().await;
            return vec![serde_json::from_slice(&body).expect("the body is JSON")];
        }
        let mut messages = Vec::new();
        while let Some(event) = self.event().await {
            messages.extend((!event.is_priming()).then(|| event.json()));
        }
        assert!(self.is_complete(), "the stream has been cut off");
        messages
    }

    /// Reads up to the event with the JSON-RPC response, or `None` if the stream ends first.
    pub async fn answer_event(&mut self) -> Option<SseEvent> {
        loop {
            let event = self.event().await?;
            if event.is_answer() {
                return Some(event);
            }
        }
    }

    /// Reads the head and the whole body.
    pub async fn reply(&mut self) -> Reply {
        let Head { status, headers } = self.head().await;
        let body = self.body_to_end().await;
        Reply {
            status,
            headers,
            body,
        }
    }

    /// Returns `true` if the last response is complete.
    ///
    /// If it is still incomplete after a reader has returned `None`, the server has cut it off.
    pub fn is_complete(&self) -> bool {
        self.body.is_complete(self.is_closed)
    }

    /// Waits for the server to close the connection, and returns the remaining bytes undecoded.
    pub async fn closed(&mut self) -> Bytes {
        while self.receive().await {}
        self.received.split().freeze()
    }

    /// Reads more bytes. Returns `false` once the connection has ended, which includes a reset.
    async fn receive(&mut self) -> bool {
        if !self.is_closed {
            let read = self.stream.read_buf(&mut self.received);
            let read = within("bytes from the server", read).await;
            self.is_closed = !matches!(read, Ok(1..));
        }
        !self.is_closed
    }
}

/// Disconnecting.
impl Connection {
    /// Closes with a FIN. Any received bytes are read first, because unread ones would cause a reset.
    pub fn fin(self) {
        let mut stream = self.stream.into_std().expect("take the socket back");
        let mut unread = [0; 4096];
        while stream.read(&mut unread).is_ok_and(|read| read > 0) {}
    }

    /// Closes with an RST, even if there are unsent or unread bytes.
    pub fn rst(self) {
        SockRef::from(&self.stream)
            .set_linger(Some(Duration::ZERO))
            .expect("set SO_LINGER");
    }

    /// Sends a FIN but can still read.
    pub async fn half_close(&mut self) {
        self.stream
            .shutdown()
            .await
            .expect("shut the write side down");
    }
}

// === impl Head ===

impl Head {
    /// Returns a header as text, or `None` if there is none.
    pub fn header(&self, name: &str) -> Option<&str> {
        let value = self.headers.get(name)?;
        Some(value.to_str().expect("the header is text"))
    }

    /// Returns `true` if the body is an event stream.
    pub fn is_event_stream(&self) -> bool {
        self.header("content-type")
            .is_some_and(|essence| essence.starts_with("text/event-stream"))
    }

    /// Removes a head from `received` and returns it, or `None` if it is still incomplete.
    fn take(received: &mut BytesMut) -> Option<Self> {
        let (line, headers) = head::take(received)?;
        let status = head::status(&line);
        Some(Self { status, headers })
    }
}

// === impl Reply ===

impl Reply {
    /// Returns the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    /// Returns the body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }
}
