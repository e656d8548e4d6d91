//! A server that a test controls byte by byte.

use std::{net::SocketAddr, time::Duration};

use bytes::BytesMut;
use http::HeaderMap;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Mutex, mpsc},
    task::JoinHandle,
};

use super::within;
use test_support::{
    body::{BodyDecoder, Decoded},
    head,
};

/// A server that hands each request to the test, which answers it.
pub(crate) struct Upstream {
    pub(crate) addr: SocketAddr,
    received: Mutex<mpsc::UnboundedReceiver<ReceivedRequest>>,
    to_test: mpsc::UnboundedSender<ReceivedRequest>,
    accepting: JoinHandle<()>,
    /// Holds the port while connections are refused.
    refusing: Option<TcpSocket>,
}

/// A request and its connection, which is closed on drop.
pub(crate) struct ReceivedRequest {
    /// The request line.
    pub(crate) line: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    stream: TcpStream,
}

// === impl Upstream ===

impl Upstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let addr = listener.local_addr().expect("an address");
        let (to_test, received) = mpsc::unbounded_channel();
        Self {
            addr,
            received: received.into(),
            accepting: accept(listener, to_test.clone()),
            refusing: None,
            to_test,
        }
    }

    /// Refuses new connections. Open ones stay open.
    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) async fn refuse(&mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
        // The kernel refuses connections to a socket that is not listening. A process that another test has just forked may hold on to the
        // listener until it execs.
        let bound = async {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_reuseaddr(true).expect("it is not bound yet");
            while socket.bind(self.addr).is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            socket
        };
        self.refusing = Some(within("the listener to close", bound).await);
    }

    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) async fn accept_again(&mut self) {
        let socket = self.refusing.take().expect("it refuses connections");
        let listener = socket.listen(1024).expect("a listener");
        self.accepting = accept(listener, self.to_test.clone());
    }

    pub(crate) async fn next_request(&self) -> ReceivedRequest {
        let mut received = self.received.lock().await;
        let received = within("a request to the server", received.recv()).await;
        received.expect("the server is running")
    }

    /// Returns `true` if there is a request that the test has not taken.
    pub(crate) async fn has_more(&self) -> bool {
        self.received.lock().await.try_recv().is_ok()
    }
}

fn accept(
    listener: TcpListener,
    to_test: mpsc::UnboundedSender<ReceivedRequest>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let to_test = to_test.clone();
            tokio::spawn(async move {
                if let Some(received) = ReceivedRequest::read(stream).await {
                    // Fails if the test has dropped the server.
                    let _ = to_test.send(received);
                }
            });
        }
    })
}

// === impl ReceivedRequest ===

impl ReceivedRequest {
    /// Reads a request, or returns `None` if its client disconnects before it is complete.
    async fn read(mut stream: TcpStream) -> Option<Self> {
        let mut received = BytesMut::new();
        let (line, headers) = loop {
            match head::take(&mut received) {
                Some(head) => break head,
                None if stream.read_buf(&mut received).await.ok()? == 0 => return None,
                None => {}
            }
        };
        let mut decoder = BodyDecoder::announced(&headers);
        let mut body = Vec::new();
        loop {
            match decoder.decode(&mut received) {
                Decoded::Data(data) => body.extend_from_slice(&data),
                Decoded::End => break,
                Decoded::More if stream.read_buf(&mut received).await.ok()? == 0 => return None,
                Decoded::More => {}
            }
        }
        Some(Self {
            line,
            headers,
            body,
            stream,
        })
    }

    pub(crate) fn body(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let written = self.stream.write_all(bytes.as_ref());
        within("the proxy to read", written)
            .await
            .expect("the proxy is reading");
    }

    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) fn reset(self) {
        self.stream.set_zero_linger().expect("a socket");
    }

    /// Answers with a whole response made up of these head lines and a body, and closes the connection.
    pub(crate) async fn answer(mut self, head: &str, body: &str) {
        let length = body.len();
        let head =
            format!("HTTP/1.1 {head}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
        self.write(head + body).await;
    }

    /// Starts an event stream that ends with the connection.
    pub(crate) async fn stream(&mut self) {
        self.write("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
    }

    /// Writes a chunk of the stream.
    pub(crate) async fn chunk(&mut self, data: &str) {
        self.write(format!("{:x}\r\n{data}\r\n", data.len())).await;
    }

    /// Writes the result of call 1.
    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) async fn send_result(&mut self) {
        self.chunk("data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n")
            .await;
    }

    pub(crate) async fn end(mut self) {
        self.write("0\r\n\r\n").await;
    }

    /// Sends more than all buffers along the way can hold, and then the answer.
    ///
    /// The proxy has to read to the end.
    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) async fn answer_at_length(mut self) {
        for _ in 0..64 {
            self.chunk(&format!(": {}\n\n", "x".repeat(64 * 1024)))
                .await;
        }
        self.send_result().await;
        self.end().await;
    }

    /// Closes the connection and waits until the proxy has noticed.
    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) async fn close(mut self) {
        self.stream.shutdown().await.expect("a connection");
        self.closed().await;
    }

    /// Waits until the proxy has closed the connection.
    pub(crate) async fn closed(&mut self) {
        let mut byte = [0];
        let read = within("the proxy to close", self.stream.read(&mut byte)).await;
        assert!(matches!(read, Ok(0) | Err(_)), "the proxy is still writing");
    }
}
