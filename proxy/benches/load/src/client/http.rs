//! A connection over HTTP/1.1, in a session.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::BytesMut;
use http::{HeaderMap, Uri};
use memchr::memmem;
use test_support::{
    body::{BodyDecoder, Decoded},
    head,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use super::{INITIALIZED, REVISION, initialize};

/// The timeout for every operation, all of which take less.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The receive buffer of a client that does not read, so that the kernel buffers little for it.
const SMALL: u32 = 4 << 10;

/// A session's address and header fields.
#[derive(Clone)]
pub(super) struct Session {
    addr: SocketAddr,
    /// The header fields sent with each request.
    headers: String,
    path: String,
}

pub(super) struct Connection {
    session: Session,
    stream: TcpStream,
    received: BytesMut,
    body: Vec<u8>,
}

/// The response to a call, and how long the awaited text took to arrive.
pub(super) struct CallResponse {
    pub(super) after: Duration,
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
}

// === impl Session ===

impl Session {
    /// Opens a session at this URL, and returns it with the connection that was used.
    pub(super) async fn begin(url: &str) -> Result<(Self, Connection)> {
        let url: Uri = url.parse()?;
        let authority = url.authority().context("no host in the URL")?.as_str();
        let mut session = Self {
            addr: authority.parse().context("no address and port")?,
            headers: format!(
                "host: {authority}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n"
            ),
            path: url.path().to_owned(),
        };
        let mut connection = session.connect().await?;
        let response = connection
            .call(&initialize(), br#""protocolVersion""#)
            .await?;
        let id = response
            .headers
            .get("mcp-session-id")
            .context("no session")?;
        let revision = memmem::find(&connection.body, REVISION.as_bytes());
        ensure!(revision.is_some(), "another revision than {REVISION}");
        session.headers += &format!(
            "mcp-session-id: {}\r\nmcp-protocol-version: {REVISION}\r\n",
            id.to_str()?
        );
        connection.session = session.clone();
        let response = connection.call(INITIALIZED, b"").await?;
        ensure!(response.status == 202, "{} to initialized", response.status);
        Ok((session, connection))
    }

    pub(super) async fn connect(&self) -> Result<Connection> {
        self.connect_with(None).await
    }

    /// Opens a connection with a small receive buffer.
    pub(super) async fn connect_small(&self) -> Result<Connection> {
        self.connect_with(Some(SMALL)).await
    }

    async fn connect_with(&self, buffer: Option<u32>) -> Result<Connection> {
        let socket = TcpSocket::new_v4()?;
        if let Some(bytes) = buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        let stream = timeout(TIMEOUT, socket.connect(self.addr)).await??;
        stream.set_nodelay(true)?;
        Ok(Connection {
            session: self.clone(),
            stream,
            received: BytesMut::with_capacity(4 << 10),
            body: Vec::new(),
        })
    }
}

// === impl Connection ===

impl Connection {
    /// Sends a message and reads the whole response, which must contain `awaited`.
    pub(super) async fn call(&mut self, message: &str, awaited: &[u8]) -> Result<CallResponse> {
        let called = async {
            let started = Instant::now();
            self.send("POST", message).await?;
            let (status, headers) = self.head().await?;
            let mut decoder = BodyDecoder::new(status, &headers);
            self.body.clear();
            let mut after = awaited.is_empty().then(|| started.elapsed());
            loop {
                match decoder.decode(&mut self.received) {
                    Decoded::Data(data) => {
                        self.body.extend_from_slice(&data);
                        if after.is_none() && memmem::find(&self.body, awaited).is_some() {
                            after = Some(started.elapsed());
                        }
                    }
                    Decoded::More => self.receive().await?,
                    Decoded::End => break,
                }
            }
            let text = || String::from_utf8_lossy(&self.body).into_owned();
            Ok(CallResponse {
                after: after.with_context(|| format!("{status}: {}", text()))?,
                status,
                headers,
            })
        };
        timeout(TIMEOUT, called).await?
    }

    /// Sends a message and waits up to `limit` for its response head.
    ///
    /// Returns `false` if the head does not arrive in time.
    ///
    /// # Errors
    ///
    /// Fails if the status is not 200.
    pub(super) async fn open(&mut self, message: &str, limit: Duration) -> Result<bool> {
        self.send("POST", message).await?;
        let Ok(head) = timeout(limit, self.head()).await else {
            return Ok(false);
        };
        let (status, _) = head?;
        ensure!(status == 200, "{status} to a call");
        Ok(true)
    }

    /// Ends the session.
    pub(super) async fn end(mut self) -> Result<()> {
        self.send("DELETE", "").await?;
        let (status, _) = timeout(TIMEOUT, self.head()).await??;
        ensure!(matches!(status, 200 | 202 | 204), "{status} to DELETE");
        Ok(())
    }

    async fn send(&mut self, method: &str, message: &str) -> Result<()> {
        let Session { headers, path, .. } = &self.session;
        let length = message.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{headers}content-length: {length}\r\n\r\n{message}"
        );
        Ok(self.stream.write_all(request.as_bytes()).await?)
    }

    async fn head(&mut self) -> Result<(u16, HeaderMap)> {
        loop {
            if let Some((line, headers)) = head::take(&mut self.received) {
                return Ok((head::status(&line), headers));
            }
            self.receive().await?;
        }
    }

    async fn receive(&mut self) -> Result<()> {
        if self.stream.read_buf(&mut self.received).await? == 0 {
            bail!("the connection was closed");
        }
        Ok(())
    }
}
