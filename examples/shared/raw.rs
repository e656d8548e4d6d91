//! HTTP/1.1 on a raw socket, for clients that can disconnect at any time.
//!
//! [`Client`] uses MCP with sessions, [`call`] MCP without sessions, and [`request`] plain HTTP.

#![allow(dead_code, unused_imports, reason = "no example uses all of it")]

use std::{io, net::SocketAddr};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

pub(crate) use self::session::Client;

mod session;

/// A sent request, and the part of its response received so far.
pub(crate) struct Connection {
    stream: TcpStream,
    received: String,
}

/// Sends a request on a new connection.
pub(crate) async fn request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> io::Result<Connection> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    let length = body.len();
    let request = format!("{head}content-length: {length}\r\n\r\n{body}");
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(request.as_bytes()).await?;
    Ok(Connection {
        stream,
        received: String::new(),
    })
}

/// Calls a tool as a client using revision 2026-07-28.
///
/// That revision has no sessions, so a disconnect cancels the call.
pub(crate) async fn call(addr: SocketAddr, tool: &str, arguments: Value) -> io::Result<Connection> {
    let message = json!({
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {
            "name": tool,
            "arguments": arguments,
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
            },
        },
    });
    let headers = [
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", "tools/call"),
        ("mcp-name", tool),
    ];
    request(addr, "POST", "/mcp", &headers, &message.to_string()).await
}

// === impl Connection ===

impl Connection {
    /// Reads until `text` has been received, and returns everything received so far.
    pub(crate) async fn read_until(&mut self, text: &str) -> io::Result<&str> {
        while !self.received.contains(text) {
            if self.read().await? == 0 {
                let received = &self.received;
                let error = format!("expected {text:?}, received {received:?}");
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, error));
            }
        }
        Ok(&self.received)
    }

    /// Reads the response head. Returns an error unless the server has accepted the request.
    pub(crate) async fn expect_accepted(mut self) -> io::Result<Self> {
        let status = self.read_until("\r\n").await?.lines().next();
        let status = status.unwrap_or_default();
        if !status.starts_with("HTTP/1.1 2") {
            return Err(io::Error::other(format!(
                "the server responded with {status:?}"
            )));
        }
        self.read_until("\r\n\r\n").await?;
        Ok(self)
    }

    /// Reads the rest of the response, and returns all of it.
    pub(crate) async fn read_to_end(mut self) -> io::Result<String> {
        while self.read().await? > 0 {}
        Ok(self.received)
    }

    /// Closes the connection, and returns everything received.
    ///
    /// Whatever has arrived is read first, because closing a socket with unread bytes resets the connection.
    pub(crate) fn hang_up(mut self) -> String {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = self.stream.try_read(&mut bytes) {
            self.append(bytes.get(..read).unwrap_or_default());
        }
        self.received
    }

    async fn read(&mut self) -> io::Result<usize> {
        let mut bytes = [0; 4096];
        let read = self.stream.read(&mut bytes).await?;
        self.append(bytes.get(..read).unwrap_or_default());
        Ok(read)
    }

    fn append(&mut self, bytes: &[u8]) {
        self.received += &String::from_utf8_lossy(bytes);
    }
}
