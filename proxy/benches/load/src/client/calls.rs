//! Clients that make one call after another.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::json;
use tokio::{
    sync::Barrier,
    task::{JoinSet, LocalSet},
};

use super::{
    echo,
    http::{Connection, Session},
    pipe::Pipe,
    text,
};

/// How many of each client's calls are not counted.
const WARM_UP: usize = 20;

enum Client {
    Http(Connection),
    Pipe(Pipe),
}

/// Prints the calls per second, and the median and 99th percentile of the latency in µs.
pub(crate) async fn run(target: &str, clients: usize, seconds: f64) -> Result<()> {
    let time = Duration::from_secs_f64(seconds);
    let local = LocalSet::new();
    let mut latencies = local
        .run_until(async {
            let ready = Rc::new(Barrier::new(clients));
            let mut tasks = JoinSet::new();
            for number in 0..clients {
                let client = Client::begin(target).await?;
                tasks.spawn_local(client.work(number, ready.clone(), time));
            }
            let mut latencies = Vec::new();
            while let Some(client_latencies) = tasks.join_next().await {
                latencies.extend(client_latencies??);
            }
            anyhow::Ok(latencies)
        })
        .await?;
    latencies.sort_unstable();
    let at = |share: usize| {
        let value = latencies
            .get(latencies.len() * share / 100)
            .context("no calls")?;
        anyhow::Ok(value.as_nanos() as f64 / 1e3)
    };
    let figures =
        json!({ "a_second": latencies.len() as f64 / seconds, "p50": at(50)?, "p99": at(99)? });
    println!("{figures}");
    Ok(())
}

// === impl Client ===

impl Client {
    async fn begin(target: &str) -> Result<Self> {
        Ok(match target {
            "pipe" => Self::Pipe(Pipe::begin().await?),
            url => Self::Http(Session::begin(url).await?.1),
        })
    }

    /// Makes calls for this long, after a warm-up and once all clients are ready, and then ends the session.
    ///
    /// Returns each call's duration.
    async fn work(
        mut self,
        number: usize,
        ready: Rc<Barrier>,
        time: Duration,
    ) -> Result<Vec<Duration>> {
        for call in 0..WARM_UP {
            self.call(number, call).await?;
        }
        ready.wait().await;
        let started = Instant::now();
        let mut latencies = Vec::new();
        while started.elapsed() < time {
            latencies.push(self.call(number, WARM_UP + latencies.len()).await?);
        }
        if let Self::Http(connection) = self {
            connection.end().await?;
        }
        Ok(latencies)
    }

    async fn call(&mut self, number: usize, call: usize) -> Result<Duration> {
        let text = text(number, call);
        let message = echo(call, &text);
        match self {
            Self::Http(connection) => {
                let response = connection.call(&message, text.as_bytes()).await?;
                Ok(response.after)
            }
            Self::Pipe(pipe) => pipe.call(&message, text.as_bytes()).await,
        }
    }
}
