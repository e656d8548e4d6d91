//! Sequential callers: a load generator, and pings that check whether a busy server still answers.

use std::{
    collections::HashMap,
    mem,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};

use anyhow::{Result, bail};
use bytes::Bytes;
use http_body_util::Full;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    client::{Client, Stream, Transport, call, ping, wire},
    runtime,
    setup::{Mode, Server},
};

/// How long to warm up.
const WARM_UP: Duration = Duration::from_millis(100);

/// How long to pause between pings.
const PING_PAUSE: Duration = Duration::from_millis(10);

/// Executes `run ADDRESS session|stateless SESSIONS CALLERS MILLISECONDS`. Returns the calls per second, and the total
/// number including the warm-up. The next run reuses the connections and sessions. The address `inside` stands for the
/// server in this process.
#[derive(Default)]
pub struct Load {
    callers: HashMap<String, Vec<Caller>>,
    inside: Option<Server<Full<Bytes>>>,
}

/// Sends one `ping` after another from a thread of its own, until dropped.
#[derive(Debug)]
pub struct Pings(Arc<Mutex<Duration>>);

/// Makes one call after another, all over one connection if the server has sockets.
struct Caller {
    client: Client,
    connection: Option<Stream>,
    next: usize,
}

// === impl Load ===

impl Load {
    pub fn inside(server: Server<Full<Bytes>>) -> Self {
        let inside = Some(server);
        Self {
            inside,
            ..Self::default()
        }
    }

    pub async fn act(&mut self, words: &[&str]) -> Result<String> {
        let ["run", address, mode, sessions, count, millis] = words else {
            bail!("no command {words:?}");
        };
        let (sessions, count): (usize, usize) = (sessions.parse()?, count.parse()?);
        let key = format!("{address} {sessions}");
        let callers = self.callers.entry(key).or_default();
        while callers.len() < count {
            let transport = match &self.inside {
                Some(server) => Transport::Direct(server.clone()),
                None => Transport::Socket(address.parse()?),
            };
            let client = match callers.len().checked_sub(sessions) {
                Some(caller) => callers[caller].client.clone(),
                None => Client::open(transport, mode.parse()?).await?,
            };
            callers.push(Caller::open(client, callers.len()).await?);
        }
        let started = Instant::now() + WARM_UP;
        let end = started + Duration::from_millis(millis.parse()?);
        let running = callers.drain(..).map(|caller| caller.run(started, end));
        let running: JoinSet<_> = running.collect();
        let (mut counted, mut total) = (0, 0);
        for done in running.join_all().await {
            let (caller, outside, between) = done?;
            total += outside + between;
            counted += between;
            callers.push(caller);
        }
        let rate = f64::from(counted) / (end - started).as_secs_f64();
        Ok(format!("{rate} {total}"))
    }
}

// === impl Pings ===

impl Pings {
    pub async fn start(address: SocketAddr) -> Result<Self> {
        let client = Client::open(Transport::Socket(address), Mode::Session).await?;
        let request = wire(client.post(&ping())?).await?;
        let worst = Arc::default();
        let longest = Arc::downgrade(&worst);
        let runtime = runtime()?;
        thread::spawn(move || runtime.block_on(keep_pinging(address, request, longest)));
        Ok(Self(worst))
    }

    /// Returns the slowest ping since the last query, or `Duration::MAX` if one failed.
    pub fn worst(&self) -> Duration {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn keep_pinging(
    address: SocketAddr,
    request: Vec<u8>,
    longest: Weak<Mutex<Duration>>,
) -> Result<()> {
    let mut connection = Stream::connect(address).await?;
    while let Some(worst) = longest.upgrade() {
        let started = Instant::now();
        let done = connection.exchange(&request, "\"result\"").await;
        // If the connection has been closed, the ping counts as unanswered.
        let taken = if done.is_ok() {
            started.elapsed()
        } else {
            Duration::MAX
        };
        record(&worst, taken);
        drop(worst);
        done?;
        sleep(PING_PAUSE).await;
    }
    Ok(())
}

fn record(worst: &Mutex<Duration>, taken: Duration) {
    let mut worst = worst.lock().unwrap_or_else(PoisonError::into_inner);
    *worst = taken.max(*worst);
}

// === impl Caller ===

impl Caller {
    async fn open(client: Client, number: usize) -> Result<Self> {
        let connection = match client.transport() {
            Transport::Socket(address) => Some(Stream::connect(*address).await?),
            Transport::Direct(_) => None,
        };
        // Keeps ids unique within a session.
        let next = number << 32;
        Ok(Self {
            client,
            connection,
            next,
        })
    }

    /// Makes calls until `end`. Counts the calls that end outside `started..end` and those that end within it.
    async fn run(mut self, started: Instant, end: Instant) -> Result<(Self, u32, u32)> {
        let (mut outside, mut between) = (0, 0);
        loop {
            self.next += 1;
            let message = call(self.next, "echo", json!({ "text": "x".repeat(100) }));
            let request = self.client.post(&message)?;
            match &mut self.connection {
                Some(connection) => connection.exchange(&wire(request).await?, "xxxxx").await?,
                None => drop(self.client.ask(request).await?),
            }
            let now = Instant::now();
            if (started..end).contains(&now) {
                between += 1
            } else {
                outside += 1
            }
            if now >= end {
                return Ok((self, outside, between));
            }
        }
    }
}
