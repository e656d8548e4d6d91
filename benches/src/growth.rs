//! What single operations cost while many calls are in flight.

use std::{fmt, time::Duration};

use anyhow::{Context, Result, ensure};
use axum::body::Body;
use bytes::Bytes;
use crabgrind::callgrind;
use http::{Method, Response};
use http_body_util::BodyExt;
use mcp_cancel_on_disconnect::{CallId, CancelOnDisconnectLayer, RequestId};
use serde_json::json;
use strum::{Display, EnumIter, EnumString, IntoEnumIterator};
use tokio::time::Instant;

use crate::{
    client::{Client, Transport, call},
    find_named,
    setup::{Mode, Setup},
    tools::Tools,
};

/// How often each operation is measured.
pub const REPETITIONS: u32 = 40;

/// The calls in flight. Displays as its own command line: `wrapped many 1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scene {
    pub spread: Spread,
    pub setup: Setup,
    pub in_flight: usize,
}

/// How the calls are spread over sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub enum Spread {
    /// 100 calls per session.
    Many,
    /// All calls in one session, including the measured one.
    One,
}

/// The operation being measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, EnumString)]
#[strum(serialize_all = "kebab-case")]
pub enum Operation {
    /// A call starts and is answered.
    Call,
    /// A client disconnects, which detaches its call.
    HangUp,
    /// A client resumes and reads the first event.
    Resume,
    /// A session with one call is deleted.
    Delete,
    /// A call is looked up by its id.
    Find,
}

/// A server with a scene's calls in flight.
struct Stage {
    scene: Scene,
    layer: CancelOnDisconnectLayer,
    /// The client whose session is measured.
    client: Client,
    _bodies: Vec<Body>,
    /// The last request id used in the measured session.
    requests: usize,
}

/// How long each repetition of an operation took.
struct Durations(Vec<Duration>);

// === impl Spread ===

impl Spread {
    /// Returns the numbers of in-flight calls to measure.
    ///
    /// In bare rmcp, the time it takes to start a session's calls is quadratic in their number, so a single session is
    /// not measured with 100,000.
    pub fn sizes(self) -> [usize; 3] {
        match self {
            Self::Many => [1, 1_000, 100_000],
            Self::One => [1, 1_000, 10_000],
        }
    }

    fn per_session(self) -> usize {
        match self {
            Self::Many => 100,
            Self::One => usize::MAX,
        }
    }
}

// === impl Scene ===

impl Scene {
    /// Returns the scene that displays as `words`.
    pub fn named(words: &str) -> Result<Self> {
        find_named(Self::all(), words)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let setups = [Setup::Bare, Setup::Layer, Setup::Wrapped];
        let pairs = Spread::iter().flat_map(move |spread| setups.map(|setup| (spread, setup)));
        pairs.flat_map(|(spread, setup)| {
            spread.sizes().map(|in_flight| Self {
                spread,
                setup,
                in_flight,
            })
        })
    }
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.setup, self.spread, self.in_flight)
    }
}

// === impl Stage ===

impl Stage {
    /// Starts the calls. The measured session is the last one.
    async fn start(scene: Scene) -> Result<Self> {
        let layer = CancelOnDisconnectLayer::new();
        let setup = scene.setup;
        let server = setup.serve(Mode::Session.config(), Tools::default(), layer.clone());
        let transport = Transport::Direct(server);
        let mut bodies = Vec::with_capacity(scene.in_flight);
        loop {
            let mut client = Client::open(transport.clone(), Mode::Session).await?;
            let left = scene.in_flight - bodies.len();
            for id in 0..left.min(scene.spread.per_session()) {
                bodies.push(wait(&mut client, id).await?.0);
            }
            if bodies.len() == scene.in_flight {
                return Ok(Self {
                    scene,
                    layer,
                    client,
                    _bodies: bodies,
                    requests: 1_000_000,
                });
            }
        }
    }

    fn find(&self) -> Option<CallId> {
        let session = self.client.session()?;
        let request = RequestId::Number(self.requests as i64);
        self.layer.calls().find(session, &request)
    }

    async fn resume(&mut self, event: &str) -> Result<Body> {
        let response = self.client.direct(self.client.get(event)?).await?;
        Ok(first_event(response).await?.0)
    }

    /// Performs the operation once, counting only the operation and not its preparation.
    async fn perform(&mut self, operation: Operation, durations: &mut Durations) -> Result<()> {
        self.requests += 1;
        match operation {
            Operation::Call => self.call(durations).await,
            Operation::Delete => self.delete(durations).await,
            Operation::HangUp | Operation::Resume | Operation::Find => {
                let (mut body, event) = wait(&mut self.client, self.requests).await?;
                settle().await;
                match operation {
                    Operation::HangUp => {
                        durations.add(async { drop(body) }).await;
                        body = self.resume(&event).await?;
                    }
                    Operation::Resume => {
                        drop(body);
                        settle().await;
                        body = durations.add(self.resume(&event)).await?;
                    }
                    _ => {
                        let call = durations.add_alone(|| self.find());
                        let is_bare = self.scene.setup == Setup::Bare;
                        ensure!(
                            call.is_some() || is_bare,
                            "the layer does not find the call"
                        );
                    }
                }
                self.cancel().await?;
                drop(body);
                settle().await;
                Ok(())
            }
        }
    }

    async fn call(&mut self, durations: &mut Durations) -> Result<()> {
        let message = call(self.requests, "measure", json!({ "text": "x" }));
        let answer = async { self.client.ask(self.client.post(&message)?).await };
        durations.add(answer).await?;
        Ok(())
    }

    async fn delete(&mut self, durations: &mut Durations) -> Result<()> {
        let mut client = Client::open(self.client.transport().clone(), Mode::Session).await?;
        let started = wait(&mut client, 0).await?;
        settle().await;
        let delete = async {
            let request = client.request(Method::DELETE, Bytes::new())?;
            client.direct(request).await
        };
        durations.add(delete).await?;
        drop(started);
        Ok(())
    }

    /// Cancels the last call with a notification. The layer's handle would visit all calls and evict the caches.
    async fn cancel(&mut self) -> Result<()> {
        let params = json!({ "requestId": self.requests });
        let method = "notifications/cancelled";
        let message = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        self.client.direct(self.client.post(&message)?).await?;
        Ok(())
    }
}

/// Calls a tool that never answers. Returns the response and an event id to resume from.
async fn wait(client: &mut Client, id: usize) -> Result<(Body, String)> {
    let request = client.post(&call(id, "wait", json!({})))?;
    first_event(client.direct(request).await?).await
}

async fn first_event(response: Response<Body>) -> Result<(Body, String)> {
    let mut body = response.into_body();
    let frame = body.frame().await.context("a stream without events")??;
    let event = frame.into_data().ok().context("trailers, not an event")?;
    let event = std::str::from_utf8(&event)?;
    let id = event.lines().find_map(|line| line.strip_prefix("id:"));
    let id = id.context("an event without an id")?.trim().to_owned();
    Ok((body, id))
}

/// Runs the tasks that an operation has woken.
async fn settle() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

// === impl Durations ===

impl Durations {
    /// Counts and times an operation together with the tasks it wakes.
    async fn add<T>(&mut self, operation: impl Future<Output = T>) -> T {
        callgrind::toggle_collect();
        let started = Instant::now();
        let done = operation.await;
        settle().await;
        self.end(started);
        done
    }

    /// Counts and times an operation that wakes no tasks.
    fn add_alone<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        callgrind::toggle_collect();
        let started = Instant::now();
        let done = operation();
        self.end(started);
        done
    }

    fn end(&mut self, started: Instant) {
        let time = started.elapsed();
        callgrind::toggle_collect();
        self.0.push(time);
    }
}

/// Measures all operations, prints each one's name and median time (ns), then exits.
pub async fn measure(scene: Scene) -> Result<()> {
    let mut stage = Stage::start(scene).await?;
    callgrind::start_instrumentation();
    for operation in Operation::iter() {
        let mut durations = Durations(Vec::with_capacity(REPETITIONS as usize));
        for _ in 0..REPETITIONS {
            stage.perform(operation, &mut durations).await?;
        }
        callgrind::dump_stats(&*operation.to_string());
        durations.0.sort_unstable();
        let median = durations
            .0
            .get(durations.0.len() / 2)
            .copied()
            .unwrap_or_default();
        println!("{operation} {}", median.as_nanos());
    }
    callgrind::stop_instrumentation();
    // Exits right away, because ending 100,000 calls one by one is not part of the measurement.
    std::process::exit(0)
}
