//! Whether a server answers while other things happen to it.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};

use anyhow::Result;
use tokio::time::{Instant, sleep};

use crate::{
    client::{Client, Stream, Way, ping, wire},
    runtime,
    setup::Mode,
};

const PAUSE: Duration = Duration::from_millis(10);

/// One `ping` after the other, from a thread of its own, until this is dropped.
#[derive(Debug)]
pub struct Pings(Arc<Mutex<Duration>>);

// === impl Pings ===

impl Pings {
    pub async fn start(address: SocketAddr) -> Result<Self> {
        let client = Client::open(Way::Socket(address), Mode::Session).await?;
        let request = wire(client.post(&ping())?).await?;
        let worst = Arc::default();
        let noted = Arc::downgrade(&worst);
        let runtime = runtime()?;
        thread::spawn(move || runtime.block_on(ask(address, request, noted)));
        Ok(Self(worst))
    }

    /// The longest that one took, since this was asked last.
    pub fn worst(&self) -> Duration {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn ask(address: SocketAddr, request: Vec<u8>, noted: Weak<Mutex<Duration>>) -> Result<()> {
    let mut connection = Stream::connect(address).await?;
    while let Some(worst) = noted.upgrade() {
        let begun = Instant::now();
        let done = connection.exchange(&request, "\"result\"").await;
        // A server that closes the connection is as bad as one that never answers.
        let taken = done.map_or(Duration::MAX, |()| begun.elapsed());
        note(&worst, taken);
        if taken == Duration::MAX {
            break;
        }
        drop(worst);
        sleep(PAUSE).await;
    }
    Ok(())
}

fn note(worst: &Mutex<Duration>, taken: Duration) {
    let mut worst = worst.lock().unwrap_or_else(PoisonError::into_inner);
    *worst = taken.max(*worst);
}
