//! A client that opens a connection for each request, and can drop it.

use std::net::SocketAddr;

use axum::body::Body;
use http::{Request, Response, header, request};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::JoinSet};

/// The JSON-RPC id of every call.
pub(super) const CALL_ID: u32 = 7;

/// Any error of a client.
pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;

/// A client with a session.
pub(super) struct Client {
    addr: SocketAddr,
    session: String,
}

/// A response and its connection. Dropping it disconnects.
pub(super) struct Events {
    body: Incoming,
    text: String,
    _connection: JoinSet<()>,
}

// === impl Client ===

impl Client {
    pub(super) async fn begin(addr: SocketAddr) -> Result<Self, Error> {
        let body = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"demo","version":"0"}}}"#;
        let (response, connection) = send(addr, post().body(body.into())?).await?;
        let session = response
            .headers()
            .get("mcp-session-id")
            .ok_or("no session")?;
        let session = session.to_str()?.to_owned();
        Events::of(response, connection).rest().await?;
        let client = Self { addr, session };
        let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        let request = post().header("mcp-session-id", &client.session);
        send(addr, request.body(initialized.into())?).await?;
        Ok(client)
    }

    /// Calls the tool `work`.
    pub(super) async fn call(&self, seconds: f64, label: &str) -> Result<Events, Error> {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{CALL_ID},"method":"tools/call","params":{{"name":"work","arguments":{{"seconds":{seconds},"label":"{label}"}}}}}}"#
        );
        let request = post()
            .header("mcp-session-id", &self.session)
            .body(body.into())?;
        let (response, connection) = send(self.addr, request).await?;
        Ok(Events::of(response, connection))
    }

    /// Resumes after an event.
    pub(super) async fn resume(&self, last: &str) -> Result<Events, Error> {
        let request = Request::get("/mcp")
            .header(header::ACCEPT, "text/event-stream")
            .header("mcp-session-id", &self.session)
            .header("last-event-id", last);
        let (response, connection) = send(self.addr, request.body(Body::empty())?).await?;
        Ok(Events::of(response, connection))
    }
}

fn post() -> request::Builder {
    Request::post("/mcp")
        .header(header::ACCEPT, "application/json, text/event-stream")
        .header(header::CONTENT_TYPE, "application/json")
}

async fn send(
    addr: SocketAddr,
    mut request: Request<Body>,
) -> Result<(Response<Incoming>, JoinSet<()>), Error> {
    let stream = TcpStream::connect(addr).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut task = JoinSet::new();
    task.spawn(async {
        // The response reports the same error.
        let _ended = connection.await;
    });
    request
        .headers_mut()
        .insert(header::HOST, addr.to_string().parse()?);
    let response = sender.send_request(request).await?;
    Ok((response, task))
}

// === impl Events ===

impl Events {
    fn of(response: Response<Incoming>, connection: JoinSet<()>) -> Self {
        Self {
            body: response.into_body(),
            text: String::new(),
            _connection: connection,
        }
    }

    /// Returns the id of the last event with an id.
    pub(super) fn last_id(&self) -> Option<&str> {
        let lines = self.text.lines().rev();
        let mut ids = lines.filter_map(|line| line.strip_prefix("id: "));
        ids.next()
    }

    /// Reads until the end of the response.
    pub(super) async fn read(&mut self) -> Result<(), Error> {
        while let Some(frame) = self.body.frame().await {
            let bytes = frame?.into_data().unwrap_or_default();
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        Ok(())
    }

    /// Reads until the end, and returns all text.
    pub(super) async fn rest(mut self) -> Result<String, Error> {
        self.read().await?;
        Ok(self.text)
    }
}
