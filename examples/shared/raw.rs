//! HTTP/1.1 on a raw socket: a client that can hang up whenever it likes.
//!
//! [`Client`] speaks MCP in sessions, [`call`] without them, and [`request`] anything.

#![allow(dead_code, unused_imports, reason = "no example needs all of it")]

use std::{io, net::SocketAddr};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

pub(crate) use self::session::Client;

mod session;

/// A request that was sent, and what has come of its response.
pub(crate) struct Connection {
    stream: TcpStream,
    received: String,
}

/// Sends a request on a connection of its own.
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

/// Calls a tool as a client of revision 2026-07-28, which has no sessions: hanging up is its cancel.
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
    /// Reads on until `text` has come, and gives everything that has.
    pub(crate) async fn until(&mut self, text: &str) -> io::Result<&str> {
        while !self.received.contains(text) {
            if self.read().await? == 0 {
                let all = &self.received;
                let error = format!("{text:?} did not come, but {all:?}");
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, error));
            }
        }
        Ok(&self.received)
    }

    /// Reads the head of the response: with it the server has taken the request. An error if it has not.
    pub(crate) async fn accepted(mut self) -> io::Result<Self> {
        let status = self.until("\r\n").await?.lines().next();
        let status = status.unwrap_or_default();
        if !status.starts_with("HTTP/1.1 2") {
            return Err(io::Error::other(format!("the server answered {status:?}")));
        }
        self.until("\r\n\r\n").await?;
        Ok(self)
    }

    /// Reads the response to its end, and gives all of it.
    pub(crate) async fn response(mut self) -> io::Result<String> {
        while self.read().await? > 0 {}
        Ok(self.received)
    }

    /// Closes the connection. What has arrived is read first: with unread bytes it would be a reset.
    pub(crate) fn hang_up(self) {
        let mut arrived = [0; 4096];
        while self
            .stream
            .try_read(&mut arrived)
            .is_ok_and(|read| read > 0)
        {}
    }

    async fn read(&mut self) -> io::Result<usize> {
        let mut bytes = [0; 4096];
        let read = self.stream.read(&mut bytes).await?;
        let bytes = bytes.get(..read).unwrap_or_default();
        self.received += &String::from_utf8_lossy(bytes);
        Ok(read)
    }
}
