//! An MCP client on a raw socket: one connection per request, HTTP/1.1 by hand.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{Result, server::Mode};

/// The JSON-RPC id of every call: it is for the server to tell them apart.
pub(crate) const CALL_ID: u32 = 7;

pub(crate) struct Client {
    addr: SocketAddr,
    session: Option<String>,
}

/// A request that was sent, and whose response was not read.
pub(crate) struct Pending(TcpStream);

// === impl Client ===

impl Client {
    /// Opens a session, if the server has sessions.
    pub(crate) async fn connect(addr: SocketAddr, mode: Mode) -> Result<Self> {
        let mut client = Self {
            addr,
            session: None,
        };
        if mode == Mode::Session {
            let initialize = json!({
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": { "name": "demo", "version": "0" },
                },
            });
            let response = client.post(&initialize).await?.response().await?;
            let session = header(&response, "mcp-session-id").ok_or("no session was opened")?;
            client.session = Some(session.to_owned());
            let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
            client.post(&initialized).await?.response().await?;
        }
        Ok(client)
    }

    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> Result<Pending> {
        let call = json!({
            "jsonrpc": "2.0",
            "id": CALL_ID,
            "method": "tools/call",
            "params": { "name": tool, "arguments": arguments },
        });
        self.post(&call).await
    }

    /// Comes back for the call: asks for what came after the first event of its stream.
    pub(crate) async fn resume(&self) -> Result<Pending> {
        self.request("GET", "last-event-id: 0/0\r\n", "").await
    }

    async fn post(&self, message: &Value) -> Result<Pending> {
        let body = message.to_string();
        let fields = format!(
            "content-type: application/json\r\n\
             content-length: {}\r\n",
            body.len()
        );
        self.request("POST", &fields, &body).await
    }

    async fn request(&self, method: &str, fields: &str, body: &str) -> Result<Pending> {
        let Self { addr, session } = self;
        let session = session
            .as_ref()
            .map(|id| format!("mcp-session-id: {id}\r\n"));
        let session = session.unwrap_or_default();
        let request = format!(
            "{method} /mcp HTTP/1.1\r\n\
             host: {addr}\r\n\
             accept: application/json, text/event-stream\r\n\
             mcp-protocol-version: 2025-06-18\r\n\
             {session}\
             {fields}\
             connection: close\r\n\
             \r\n\
             {body}"
        );
        let mut connection = TcpStream::connect(addr).await?;
        connection.write_all(request.as_bytes()).await?;
        Ok(Pending(connection))
    }
}

// === impl Pending ===

impl Pending {
    /// Reads the response to its end, head and all.
    pub(crate) async fn response(mut self) -> Result<String> {
        let mut response = String::new();
        self.0.read_to_string(&mut response).await?;
        let status = response.lines().next().unwrap_or_default();
        if status.starts_with("HTTP/1.1 2") {
            Ok(response)
        } else {
            Err(format!("the server answered {status:?}").into())
        }
    }

    /// Closes the connection. What has arrived is read first: with unread bytes it would be a reset.
    pub(crate) fn hang_up(self) {
        let mut arrived = [0; 4096];
        while self.0.try_read(&mut arrived).is_ok_and(|read| read > 0) {}
    }
}

fn header<'a>(response: &'a str, name: &str) -> Option<&'a str> {
    let fields = response.lines().take_while(|line| !line.is_empty());
    let mut fields = fields.filter_map(|line| line.split_once(": "));
    let (_, value) = fields.find(|(field, _)| field.eq_ignore_ascii_case(name))?;
    Some(value)
}
