//! A load generator: keep-alive connections on which one call follows the other.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{net::TcpStream, task::JoinSet, time::Instant};

use crate::{
    Failure,
    setup::Mode,
    sockets::client::{Client, Way, call_message},
};

/// Before it counts.
const WARM_UP: Duration = Duration::from_millis(100);

/// What is told to do `run ADDRESS session|stateless CONNECTIONS MILLISECONDS` and answers with
/// calls a second, and with how many there were, warm-up and all. Connections and sessions are kept for the next time.
#[derive(Default)]
pub struct Load {
    callers: HashMap<SocketAddr, Vec<Caller>>,
    tasks: JoinSet<()>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Calls {
    all: u64,
    /// Those that ended in the time that is measured.
    counted: u64,
}

/// One connection, with a session of its own.
struct Caller {
    client: Client,
    connection: SendRequest<Full<Bytes>>,
    next: usize,
}

// === impl Load ===

impl Load {
    pub async fn act(&mut self, words: &[&str]) -> Result<String, Failure> {
        let ["run", address, mode, connections, millis] = words else {
            return Err(format!("no command {words:?}").into());
        };
        let address = address.parse()?;
        let mode = match *mode {
            "session" => Mode::Session,
            _ => Mode::Stateless,
        };
        let mut callers = match self.callers.remove(&address) {
            Some(callers) => callers,
            None => {
                let mut callers = Vec::new();
                for _ in 0..connections.parse()? {
                    callers.push(self.open(address, mode).await?);
                }
                callers
            }
        };
        let begun = Instant::now() + WARM_UP;
        let end = begun + Duration::from_millis(millis.parse()?);
        let mut running = JoinSet::new();
        for caller in callers.drain(..) {
            running.spawn(caller.run(begun, end));
        }
        let (mut counted, mut all) = (0, 0);
        while let Some(done) = running.join_next().await {
            let (caller, calls) = done??;
            all += calls.all;
            counted += calls.counted;
            callers.push(caller);
        }
        self.callers.insert(address, callers);
        let rate = counted as f64 / (end - begun).as_secs_f64();
        Ok(format!("{rate} {all}"))
    }

    async fn open(&mut self, address: SocketAddr, mode: Mode) -> Result<Caller, Failure> {
        let client = Client::open(Way::Socket(address), mode).await?;
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let (connection, driver) = handshake(TokioIo::new(socket)).await?;
        // An error of the connection is an error of its next request.
        self.tasks.spawn(async move { drop(driver.await) });
        Ok(Caller {
            client,
            connection,
            next: 0,
        })
    }
}

// === impl Caller ===

impl Caller {
    /// Calls until the end, and counts what ends between the two moments.
    async fn run(mut self, begun: Instant, end: Instant) -> Result<(Self, Calls), Failure> {
        let mut calls = Calls::default();
        loop {
            self.call().await?;
            calls.all += 1;
            let now = Instant::now();
            if now >= end {
                return Ok((self, calls));
            }
            calls.counted += u64::from(now >= begun);
        }
    }

    async fn call(&mut self) -> Result<(), Failure> {
        self.next += 1;
        let arguments = json!({ "text": "x".repeat(100) });
        let message = call_message(self.next, "echo", arguments);
        self.connection.ready().await?;
        let request = self.client.post(&message)?;
        let response = self.connection.send_request(request).await?;
        let status = response.status();
        let answer = response.into_body().collect().await?.to_bytes();
        let is_right = answer.windows(5).any(|part| part == b"xxxxx");
        match status.is_success() && is_right {
            true => Ok(()),
            false => Err(format!("{status}: {}", String::from_utf8_lossy(&answer)).into()),
        }
    }
}
