//! A load generator: keep-alive connections on which one call follows the other.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use anyhow::{Result, bail};
use serde_json::json;
use tokio::{task::JoinSet, time::Instant};

use crate::{
    client::{Client, Stream, Way, call, wire},
    setup::Mode,
};

/// Before it counts.
const WARM_UP: Duration = Duration::from_millis(100);

/// What is told to do `run ADDRESS session|stateless CONNECTIONS MILLISECONDS` and answers with
/// calls a second, and with how many there were, warm-up and all. Connections and sessions are kept for the next time.
#[derive(Default)]
pub struct Load {
    callers: HashMap<SocketAddr, Vec<Caller>>,
}

/// One connection, with a session of its own.
struct Caller {
    client: Client,
    connection: Stream,
    next: usize,
}

// === impl Load ===

impl Load {
    pub async fn act(&mut self, words: &[&str]) -> Result<String> {
        let ["run", address, mode, connections, millis] = words else {
            bail!("no command {words:?}");
        };
        let address = address.parse()?;
        let mut callers = self.callers.remove(&address).unwrap_or_default();
        while callers.len() < connections.parse()? {
            callers.push(Caller::open(address, mode.parse()?).await?);
        }
        let begun = Instant::now() + WARM_UP;
        let end = begun + Duration::from_millis(millis.parse()?);
        let running = callers.into_iter().map(|caller| caller.run(begun, end));
        let running: JoinSet<_> = running.collect();
        let (mut counted, mut all, mut callers) = (0, 0, Vec::new());
        for done in running.join_all().await {
            let (caller, before, during) = done?;
            all += before + during;
            counted += during;
            callers.push(caller);
        }
        self.callers.insert(address, callers);
        let rate = f64::from(counted) / (end - begun).as_secs_f64();
        Ok(format!("{rate} {all}"))
    }
}

// === impl Caller ===

impl Caller {
    async fn open(address: SocketAddr, mode: Mode) -> Result<Self> {
        Ok(Self {
            client: Client::open(Way::Socket(address), mode).await?,
            connection: Stream::connect(address).await?,
            next: 0,
        })
    }

    /// Calls until the end; counts the calls that end outside of the two moments, and between them.
    async fn run(mut self, begun: Instant, end: Instant) -> Result<(Self, u32, u32)> {
        let (mut outside, mut between) = (0, 0);
        loop {
            self.next += 1;
            let message = call(self.next, "echo", json!({ "text": "x".repeat(100) }));
            let request = wire(self.client.post(&message)?).await?;
            self.connection.exchange(&request, "xxxxx").await?;
            let now = Instant::now();
            if (begun..end).contains(&now) {
                between += 1;
            } else {
                outside += 1;
            }
            if now >= end {
                return Ok((self, outside, between));
            }
        }
    }
}
