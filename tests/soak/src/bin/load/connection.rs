//! One of a raw client's TCP connections, with one request on it.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;
use soak::{
    fact::{CloseKind, Fact, Log, Stream},
    setup::Setup,
    wire::{Event, Item, Responses},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout, timeout_at},
};

use crate::dice::Only;

/// The state that all clients share.
pub(crate) struct World {
    pub(crate) log: Log,
    pub(crate) ports: Ports,
    pub(crate) only: Only,
    next: AtomicU64,
}

/// The server's ports.
#[derive(Deserialize)]
pub(crate) struct Ports {
    plain: u16,
    /// The port where hyper also learns of disconnects that it would not read itself.
    watched: u16,
    drained: u16,
}

/// A connection. The fact that it was closed is always recorded, on drop at the latest.
pub(crate) struct Connection {
    stream: Option<TcpStream>,
    world: Arc<World>,
    pub(crate) number: Stream,
    responses: Responses,
    items: VecDeque<Item>,
}

/// A request as bytes.
pub(crate) struct Request {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// Receive buffer of a client that does not read.
const SMALL: u32 = 4096;
const TIMEOUT: Duration = Duration::from_secs(20);

// === impl World ===

impl World {
    pub(crate) fn new(log: Log, ports: Ports, only: Only) -> Self {
        let next = AtomicU64::new(1);
        Self {
            log,
            ports,
            only,
            next,
        }
    }

    /// Returns a number for a new stream.
    pub(crate) fn next_stream(&self) -> Stream {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the set-up's port. `watched` selects the listener that watches its connections, if the set-up has one.
    pub(crate) fn port(&self, setup: &Setup, watched: bool) -> u16 {
        match (setup.is_drained, watched) {
            (true, _) => self.ports.drained,
            (false, true) => self.ports.watched,
            (false, false) => self.ports.plain,
        }
    }
}

// === impl Connection ===

impl Connection {
    pub(crate) async fn open(world: &Arc<World>, port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        Ok(Self::over(world, stream))
    }

    /// Connects with a small receive buffer, for a client that reads little.
    pub(crate) async fn open_small(world: &Arc<World>, port: u16) -> io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(SMALL)?;
        let stream = socket.connect(([127, 0, 0, 1], port).into()).await?;
        Ok(Self::over(world, stream))
    }

    fn over(world: &Arc<World>, stream: TcpStream) -> Self {
        let _result = stream.set_nodelay(true);
        Self {
            stream: Some(stream),
            number: world.next_stream(),
            world: world.clone(),
            responses: Responses::default(),
            items: VecDeque::new(),
        }
    }

    pub(crate) async fn send(&mut self, request: &Request) -> io::Result<()> {
        self.write(&request.bytes()).await
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let stream = self.stream.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        timeout(TIMEOUT, stream.write_all(bytes)).await?
    }

    /// Returns the next item, or `None` once the server has closed. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Item> {
        loop {
            if let Some(item) = self.items.pop_front() {
                return Some(item);
            }
            let mut bytes = [0; 16 * 1024];
            match self.stream.as_mut()?.read(&mut bytes).await {
                Ok(0) | Err(_) => return None,
                Ok(length) => self.items.extend(self.responses.feed(&bytes[..length])),
            }
        }
    }

    /// Reads the whole response. Returns its status, its session id and its events.
    ///
    /// Returns `None` if the response is still incomplete after [`TIMEOUT`], or when the server closes.
    pub(crate) async fn reply(&mut self) -> Option<(u16, Option<String>, Vec<Event>)> {
        let (mut head, mut events) = (None, Vec::new());
        let until = Instant::now() + TIMEOUT;
        loop {
            match timeout_at(until, self.next()).await.ok()?? {
                Item::Head { status, session } => head = Some((status, session)),
                Item::Event(event) => events.push(event),
                Item::End => return head.map(|(status, session)| (status, session, events)),
            }
        }
    }

    /// Records that the server has ended the response, and drops the connection. The client then records no disconnect of its
    /// own.
    pub(crate) fn record_end(mut self) {
        self.world.log.write(Fact::StreamEnded {
            stream: self.number,
            clean: true,
        });
        self.stream = None;
    }

    /// Closes the connection in this way, recording that both before and after.
    pub(crate) async fn close(mut self, how: CloseKind) {
        let number = self.number;
        self.world.log.write(Fact::Closing {
            stream: number,
            how,
        });
        let Some(mut stream) = self.stream.take() else {
            return;
        };
        match how {
            CloseKind::Reset | CloseKind::Proxy => {
                let _result = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
            }
            CloseKind::Half => {
                let _result = stream.shutdown().await;
            }
            CloseKind::Pipelined => {
                let next = b"GET /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
                let _sent = timeout(TIMEOUT, stream.write_all(next)).await;
            }
            CloseKind::Fin => {}
        }
        if how == CloseKind::Half {
            self.world.log.write(Fact::Closed { stream: number });
            // A half-closed client can still read, but the server no longer serves it.
            let read =
                async { while stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {} };
            let _over = timeout(Duration::from_secs(1), read).await;
            return;
        }
        drop(stream);
        self.world.log.write(Fact::Closed { stream: number });
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            let number = self.number;
            self.world.log.write(Fact::Closing {
                stream: number,
                how: CloseKind::Fin,
            });
            drop(stream);
            self.world.log.write(Fact::Closed { stream: number });
        }
    }
}

// === impl Request ===

impl Request {
    pub(crate) fn post(path: &str, session: Option<&str>, message: &Value) -> Self {
        let body = serde_json::to_vec(message).expect("JSON");
        Self::raw(path, session, body)
    }

    pub(crate) fn raw(path: &str, session: Option<&str>, body: Vec<u8>) -> Self {
        let mut request = Self::new("POST", path, session);
        request.head += &format!(
            "content-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        request.body = body;
        request
    }

    pub(crate) fn get(path: &str, session: Option<&str>, last_event_id: Option<&str>) -> Self {
        let mut request = Self::new("GET", path, session);
        if let Some(id) = last_event_id {
            request.head += &format!("last-event-id: {id}\r\n");
        }
        request
    }

    pub(crate) fn delete(path: &str, session: &str) -> Self {
        Self::new("DELETE", path, Some(session))
    }

    /// Returns the request that makes the server end a stream.
    pub(crate) fn poll(setup: &Setup, session: &str, stream: &str) -> Self {
        let route = setup.route;
        Self {
            head: format!(
                "POST /poll/{route}/{session}/{stream} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n"
            ),
            body: Vec::new(),
        }
    }

    fn new(method: &str, path: &str, session: Option<&str>) -> Self {
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json, text/event-stream\r\n"
        );
        if let Some(session) = session {
            head += &format!("mcp-session-id: {session}\r\nmcp-protocol-version: 2025-11-25\r\n");
        }
        Self {
            head,
            body: Vec::new(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [self.head.as_bytes(), b"\r\n", &self.body].concat()
    }
}
