//! An MCP client for revision 2025-11-25, on raw sockets. Each request gets a new connection.

use std::{io, net::SocketAddr};

use serde_json::{Value, json};

use super::{Connection, request};

/// A client, with its own session if the server has sessions.
pub(crate) struct Client {
    addr: SocketAddr,
    session: Option<String>,
}

// === impl Client ===

impl Client {
    /// Creates a client for a server without sessions.
    pub(crate) fn without_session(addr: SocketAddr) -> Self {
        Self {
            addr,
            session: None,
        }
    }

    /// Opens a session.
    pub(crate) async fn connect(addr: SocketAddr) -> io::Result<Self> {
        let mut client = Self::without_session(addr);
        let params = json!({
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": { "name": "example", "version": "0" },
        });
        let initialize =
            json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params });
        let response = client.post(&initialize).await?.expect_accepted().await?;
        let response = response.read_to_end().await?;
        let mut fields = response.lines().filter_map(|line| line.split_once(": "));
        let session = fields.find(|(name, _)| name.eq_ignore_ascii_case("mcp-session-id"));
        let (_, session) = session.ok_or_else(|| io::Error::other("no session was opened"))?;
        client.session = Some(session.to_owned());
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.post(&initialized).await?.read_to_end().await?;
        Ok(client)
    }

    pub(crate) async fn call(
        &self,
        id: impl Into<Value>,
        tool: &str,
        arguments: Value,
    ) -> io::Result<Connection> {
        let id: Value = id.into();
        let params = json!({ "name": tool, "arguments": arguments });
        self.post(&json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params }))
            .await
    }

    /// Opens the session's standalone stream.
    pub(crate) async fn listen(&self) -> io::Result<Connection> {
        self.request("GET", &[], "").await
    }

    /// Resumes after an event.
    pub(crate) async fn resume(&self, last_event_id: &str) -> io::Result<Connection> {
        self.request("GET", &[("last-event-id", last_event_id)], "")
            .await
    }

    async fn post(&self, message: &Value) -> io::Result<Connection> {
        let json = [("content-type", "application/json")];
        self.request("POST", &json, &message.to_string()).await
    }

    async fn request(
        &self,
        method: &str,
        extra_headers: &[(&str, &str)],
        body: &str,
    ) -> io::Result<Connection> {
        let mut headers = vec![
            ("accept", "application/json, text/event-stream"),
            ("mcp-protocol-version", "2025-11-25"),
        ];
        headers.extend_from_slice(extra_headers);
        if let Some(session) = &self.session {
            headers.push(("mcp-session-id", session));
        }
        request(self.addr, method, "/mcp", &headers, body).await
    }
}
