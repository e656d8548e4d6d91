//! Clients of the server, and its shutdown before their eyes.

use std::{error::Error, net::SocketAddr, process::ExitCode, time::Duration};

use mcp_cancel_on_disconnect::DrainReport;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{Instant, timeout},
};

use super::{CALLS_MAY_TAKE, CONNECTIONS_MAY_TAKE, app, serve_until};

/// What the cancels of the last calls may take, and a busy machine.
const MARGIN: Duration = Duration::from_secs(5);

/// How long the calls of the clients take: half of them are done in time.
const WORK: [u64; 4] = [1, 1, 600, 600];

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// One session: a connection per request, HTTP/1.1 by hand.
struct Client {
    addr: SocketAddr,
    session: String,
}

/// A response, as far as it was read.
struct Response {
    connection: TcpStream,
    text: String,
}

/// What became of everything.
struct Seen {
    report: DrainReport,
    took: Duration,
    answers: Vec<Answer>,
    closed_streams: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Result,
    Cancelled,
    Other,
}

pub(super) async fn run() -> Result<ExitCode> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let (app, calls) = app();
    let (shut_down, shutting_down) = oneshot::channel();
    let shutdown = async {
        shutting_down.await.ok();
    };
    let server = serve_until(shutdown, listener, app, calls);
    let clients = async {
        let mut streams = Vec::new();
        let mut calls = Vec::new();
        for seconds in WORK {
            let client = Client::connect(addr).await?;
            streams.push(client.listen().await?);
            calls.push(client.work(seconds).await?);
        }
        println!(
            "{} calls and as many standalone streams are open",
            WORK.len()
        );
        let begun = Instant::now();
        shut_down.send(()).ok();
        let mut answers = Vec::new();
        for call in calls {
            answers.push(Answer::read(&call.whole().await?));
        }
        let mut closed_streams = 0;
        for stream in streams {
            stream.whole().await?;
            closed_streams += 1;
        }
        Ok::<_, Box<dyn Error>>((begun, answers, closed_streams))
    };
    let together = async { tokio::join!(server, clients) };
    let limit = CALLS_MAY_TAKE + CONNECTIONS_MAY_TAKE + MARGIN;
    let (report, clients) = timeout(2 * limit, together).await?;
    let (begun, answers, closed_streams) = clients?;
    let seen = Seen {
        report: report?,
        took: begun.elapsed(),
        answers,
        closed_streams,
    };
    Ok(seen.judge(limit))
}

// === impl Seen ===

impl Seen {
    fn judge(&self, limit: Duration) -> ExitCode {
        let Self {
            report,
            took,
            answers,
            closed_streams,
        } = self;
        println!(
            "{} calls ended, {} were cancelled; the server ended after {:.1} s",
            report.ended,
            report.cancelled,
            took.as_secs_f64()
        );
        println!("the clients got: {answers:?}, and {closed_streams} standalone streams ended");
        let expected = WORK.map(|seconds| match seconds {
            0..=1 => Answer::Result,
            _ => Answer::Cancelled,
        });
        let as_expected = (report.ended, report.cancelled) == (2, 2)
            && *answers == expected
            && *closed_streams == WORK.len()
            && *took <= limit;
        if as_expected {
            println!("all as expected");
            ExitCode::SUCCESS
        } else {
            println!("expected: 2 and 2, {expected:?}, 4 streams, at most {limit:?}");
            ExitCode::FAILURE
        }
    }
}

impl Answer {
    fn read(response: &str) -> Self {
        if response.contains(r#""result":"#) {
            Self::Result
        } else if response.contains(r#""code":-32800"#) {
            Self::Cancelled
        } else {
            Self::Other
        }
    }
}

// === impl Client ===

impl Client {
    async fn connect(addr: SocketAddr) -> Result<Self> {
        let session = String::new();
        let mut client = Self { addr, session };
        let params = json!({
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": { "name": "demo", "version": "0" },
        });
        let initialize =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params });
        let response = client.post(&initialize).await?.whole().await?;
        let mut lines = response.lines();
        let session = lines.find_map(|line| line.strip_prefix("mcp-session-id: "));
        client.session = session.ok_or("no session was opened")?.to_owned();
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.post(&initialized).await?.whole().await?;
        Ok(client)
    }

    async fn work(&self, seconds: u64) -> Result<Response> {
        let params = json!({ "name": "work", "arguments": { "seconds": seconds } });
        self.post(&json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params }))
            .await
    }

    async fn listen(&self) -> Result<Response> {
        self.request("GET", "").await
    }

    async fn post(&self, message: &Value) -> Result<Response> {
        self.request("POST", &message.to_string()).await
    }

    async fn request(&self, method: &str, body: &str) -> Result<Response> {
        let Self { addr, session } = self;
        let session = match session.as_str() {
            "" => String::new(),
            id => format!("mcp-session-id: {id}\r\n"),
        };
        let length = body.len();
        let request = format!(
            "{method} /mcp HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n{session}\
             accept: application/json, text/event-stream\r\nmcp-protocol-version: 2025-06-18\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let mut connection = TcpStream::connect(addr).await?;
        connection.write_all(request.as_bytes()).await?;
        let text = String::new();
        Response { connection, text }.head().await
    }
}

// === impl Response ===

impl Response {
    /// With its head the server has taken the request.
    async fn head(mut self) -> Result<Self> {
        while !self.text.contains("\r\n\r\n") {
            let mut byte = [0];
            self.connection.read_exact(&mut byte).await?;
            self.text.extend(byte.map(char::from));
        }
        match self.text.starts_with("HTTP/1.1 2") {
            true => Ok(self),
            false => Err(self.text.into()),
        }
    }

    async fn whole(mut self) -> Result<String> {
        self.connection.read_to_string(&mut self.text).await?;
        Ok(self.text)
    }
}
