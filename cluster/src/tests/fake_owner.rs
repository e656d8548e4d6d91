//! An owner whose behaviour is controlled by a test.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use test_support::{Mcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};

use super::{node::Node, steps::directory};
use crate::{
    directory::{Directory as _, Registration, Status, faulty::Faulty},
    ids::{Epoch, Incarnation, Owner, SessionHash},
};

/// Reserves an address without listening on it, so that no other test can get it in the meantime.
pub(super) fn reserve_address(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket
}

/// The owner of sessions that are not open on any instance.
pub(super) struct FakeOwner {
    pub(super) me: Owner,
    directory: Faulty,
    listener: Option<TcpListener>,
    #[allow(dead_code, reason = "keeps the address reserved")]
    reserved: Option<TcpSocket>,
    session_count: u32,
}

/// A request that the fake owner has received.
pub(super) struct Relayed {
    pub(super) head: String,
    pub(super) body: Bytes,
    stream: TcpStream,
}

// === impl FakeOwner ===

impl FakeOwner {
    /// Returns an owner that is listening and has a lease.
    pub(super) async fn new(directory: &Faulty) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = Owner {
            address: listener.local_addr().unwrap(),
            incarnation: Incarnation::random(),
        };
        let owner = Self {
            me,
            directory: directory.clone(),
            listener: Some(listener),
            reserved: None,
            session_count: 0,
        };
        owner.renew_lease().await;
        owner
    }

    /// Starts an instance on a new directory, and a fake owner with a session.
    ///
    /// Returns the session's client at that instance as well.
    pub(super) async fn with_session() -> (Faulty, Node, Self, Mcp) {
        let directory = directory();
        let [node] = Node::several(&directory).await;
        let mut owner = Self::new(&directory).await;
        let mcp = owner.session(&node).await;
        (directory, node, owner, mcp)
    }

    /// Renews the lease, declaring that all sessions have been written.
    pub(super) async fn renew_lease(&self) {
        let run = self.directory.memory.leases().await.unwrap().run;
        let status = Status {
            written_in: Some(run),
            ..Status::default()
        };
        self.directory
            .memory
            .acquire_lease(self.me, &status)
            .await
            .unwrap();
    }

    /// Registers a new session of this owner and returns its client at `node`.
    pub(super) async fn session(&mut self, node: &Node) -> Mcp {
        self.session_count += 1;
        let id = format!("session {} of {}", self.session_count, self.me);
        let params = br#"{"initialize_params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"owner","version":"0"}}}"#[..].into();
        let entry = Registration {
            session: SessionHash::of(&id),
            epoch: Epoch::now(),
            renewed: None,
            params,
        };
        assert_eq!(
            self.directory
                .memory
                .register(self.me, &[entry])
                .await
                .unwrap(),
            []
        );
        node.client(&id)
    }

    pub(super) async fn release_lease(&mut self) {
        self.directory.memory.release_lease(self.me).await.unwrap();
    }

    /// Stops listening, but keeps the address reserved.
    pub(super) fn close(&mut self) {
        self.listener = None;
        self.reserved = Some(reserve_address(self.me.address));
    }

    /// Returns the next request.
    pub(super) async fn request(&mut self) -> Relayed {
        within("a request", Relayed::read(self.head().await)).await
    }

    /// Returns the next request's head without asking for the body.
    pub(super) async fn head(&mut self) -> Relayed {
        let listener = self.listener.as_ref().unwrap();
        let (stream, _) = within("a relay", listener.accept()).await.unwrap();
        within("a request head", Relayed::read_head(stream)).await
    }
}

// === impl Relayed ===

impl Relayed {
    async fn read_head(mut stream: TcpStream) -> Self {
        let mut read = BytesMut::new();
        let end = loop {
            if let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0);
        };
        let head = String::from_utf8(read.split_to(end).to_vec()).unwrap();
        let body = read.freeze();
        Self { head, body, stream }
    }

    /// Reads the body, after asking for it if the relay expects that.
    async fn read(mut self) -> Self {
        if self.head.contains("expect: 100-continue") {
            assert_eq!(self.body, "", "the body has not been asked for");
            self.write("HTTP/1.1 100 Continue\r\n\r\n").await;
        }
        let mut read = BytesMut::from(self.body);
        let is_chunked = self.head.contains("transfer-encoding: chunked");
        let length = self
            .head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        while read.len() < length || (is_chunked && !read.ends_with(b"\r\n0\r\n\r\n")) {
            assert_ne!(self.stream.read_buf(&mut read).await.unwrap(), 0);
        }
        self.body = read.freeze();
        self
    }

    /// Writes these bytes unchanged.
    pub(super) async fn write(&mut self, bytes: &str) {
        self.stream.write_all(bytes.as_bytes()).await.unwrap();
    }

    /// Answers as `me`'s incarnation.
    pub(super) async fn answer(mut self, status: &str, me: Owner, body: &str) {
        let (incarnation, length) = (me.incarnation, body.len());
        self.write(&format!(
            "HTTP/1.1 {status}\r\nmcp-cluster: {incarnation}\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
        .await;
    }

    /// Answers as `me`'s incarnation that it does not have the session.
    pub(super) async fn answer_moved(mut self, me: Owner) {
        let incarnation = me.incarnation;
        self.write(&format!(
            "HTTP/1.1 421 Misdirected Request\r\nmcp-cluster: moved {incarnation}\r\ncontent-length: 0\r\n\r\n"
        ))
        .await;
    }

    /// Waits until the peer closes the connection, and asserts that it has sent nothing else.
    pub(super) async fn until_closed(mut self) {
        let mut rest = Vec::new();
        let end = self.stream.read_to_end(&mut rest);
        // A reset also ends the connection.
        let _ = within("the relay to disconnect", end).await;
        assert_eq!(rest, b"");
    }
}
