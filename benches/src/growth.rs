//! What single operations cost beside many calls in flight.

use std::{fmt, str::FromStr, time::Duration};

use axum::body::Body;
use crabgrind::callgrind;
use mcp_cancel_on_disconnect::{CallId, CancelOnDisconnectLayer, RequestId};
use serde_json::json;
use tokio::time::Instant;

use crate::{
    Failure,
    client::{Client, Started, call},
    setup::{Mode, Setup},
    tools::Tools,
};

/// How often each operation is measured.
pub const REPETITIONS: u32 = 40;

/// Calls in flight, in words that are also a command line: `wrapped many 1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scene {
    pub setup: Setup,
    pub spread: Spread,
    pub in_flight: usize,
}

/// How the calls are spread over sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// 100 in each.
    Many,
    /// All in one, and so is the one that is measured.
    One,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A call starts and is answered.
    Call,
    /// A client hangs up: its call is detached.
    HangUp,
    /// It comes back, up to the first event.
    Resume,
    /// A session with one call is deleted.
    Delete,
    /// A call is looked up by its id.
    Find,
}

struct Stage {
    scene: Scene,
    layer: CancelOnDisconnectLayer,
    /// The measured session.
    client: Client,
    _bodies: Vec<Body>,
    asked: u64,
}

/// What an operation took each time it was done.
struct Took {
    started: Option<Instant>,
    times: Vec<Duration>,
}

// === impl Operation ===

impl Operation {
    pub const ALL: [Self; 5] = [
        Self::Call,
        Self::HangUp,
        Self::Resume,
        Self::Delete,
        Self::Find,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Call => "call",
            Self::HangUp => "hang-up",
            Self::Resume => "resume",
            Self::Delete => "delete",
            Self::Find => "find",
        }
    }
}

// === impl Spread ===

impl Spread {
    pub const ALL: [Self; 2] = [Self::Many, Self::One];

    pub fn name(self) -> &'static str {
        match self {
            Self::Many => "many",
            Self::One => "one",
        }
    }

    fn size(self) -> usize {
        match self {
            Self::Many => 100,
            Self::One => usize::MAX,
        }
    }
}

// === impl Scene ===

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            setup,
            spread,
            in_flight,
        } = self;
        write!(f, "{} {} {in_flight}", setup.name(), spread.name())
    }
}

impl FromStr for Scene {
    type Err = Failure;

    fn from_str(words: &str) -> Result<Self, Failure> {
        let unknown = || format!("no scene {words:?}");
        let words: Vec<&str> = words.split(' ').collect();
        let [setup, spread, in_flight] = *words.as_slice() else {
            return Err(unknown().into());
        };
        let setup = Setup::ALL.into_iter().find(|each| each.name() == setup);
        let spread = Spread::ALL.into_iter().find(|each| each.name() == spread);
        Ok(Self {
            setup: setup.ok_or_else(unknown)?,
            spread: spread.ok_or_else(unknown)?,
            in_flight: in_flight.parse()?,
        })
    }
}

// === impl Stage ===

impl Stage {
    /// Starts the calls. The measured session is the last, and has calls of its own.
    async fn set(scene: Scene) -> Result<Self, Failure> {
        let layer = CancelOnDisconnectLayer::new();
        let server = scene
            .setup
            .serve(Mode::Session, Tools::default(), layer.clone());
        let mut bodies = Vec::with_capacity(scene.in_flight);
        let mut left = scene.in_flight;
        loop {
            let mut client = Client::initialize(server.clone()).await?;
            let here = left.min(scene.spread.size());
            for id in 0..here {
                let message = call(id as u64, "wait", json!({}));
                bodies.push(client.start(&message).await?.body);
            }
            left -= here;
            if left == 0 {
                return Ok(Self {
                    scene,
                    layer,
                    client,
                    _bodies: bodies,
                    asked: 1_000_000,
                });
            }
        }
    }

    async fn start(&mut self) -> Result<(Started, RequestId), Failure> {
        self.asked += 1;
        let message = call(self.asked, "wait", json!({}));
        let started = self.client.start(&message).await?;
        Ok((started, RequestId::Number(self.asked as i64)))
    }

    fn find(&self, request: &RequestId) -> Option<CallId> {
        let session = self.client.session()?;
        self.layer.calls().find(session, request)
    }

    /// Does the operation once; only what it is about is counted.
    async fn perform(&mut self, operation: Operation, took: &mut Took) -> Result<(), Failure> {
        if operation == Operation::Call {
            self.asked += 1;
            let message = call(self.asked, "measure", json!({ "text": "x" }));
            took.on();
            self.client.call(&message).await?;
            settle().await;
            took.off();
            return Ok(());
        }
        if operation == Operation::Delete {
            let server = self.client.server();
            let mut client = Client::initialize(server).await?;
            let started = client.start(&call(0, "wait", json!({}))).await?;
            settle().await;
            took.on();
            client.delete().await?;
            settle().await;
            took.off();
            drop(started);
            return Ok(());
        }
        let (mut started, request) = self.start().await?;
        settle().await;
        if operation == Operation::Find {
            took.on();
            let found = self.find(&request);
            took.off();
            if found.is_none() && self.scene.setup != Setup::Bare {
                return Err("the call is not there".into());
            }
        } else {
            let hang_up = operation == Operation::HangUp;
            let event_id = started.event_id.clone();
            if hang_up {
                took.on();
            }
            drop(started);
            settle().await;
            if hang_up {
                took.off();
            } else {
                took.on();
            }
            started = self.client.resume(&event_id).await?;
            if !hang_up {
                settle().await;
                took.off();
            }
        }
        // Not by the handle, which would look at all calls and leave cold caches.
        self.client.cancel(self.asked).await?;
        drop(started);
        settle().await;
        Ok(())
    }
}

// === impl Took ===

impl Took {
    fn on(&mut self) {
        callgrind::toggle_collect();
        self.started = Some(Instant::now());
    }

    fn off(&mut self) {
        let time = self.started.take().map(|started| started.elapsed());
        callgrind::toggle_collect();
        self.times.extend(time);
    }

    fn median(&mut self) -> Duration {
        self.times.sort_unstable();
        self.times
            .get(self.times.len() / 2)
            .copied()
            .unwrap_or_default()
    }
}

/// Measures all operations, and prints the name and the median time (ns) of each.
pub async fn measure(scene: Scene) -> Result<(), Failure> {
    let mut stage = Stage::set(scene).await?;
    callgrind::start_instrumentation();
    for operation in Operation::ALL {
        let mut took = Took {
            started: None,
            times: Vec::with_capacity(REPETITIONS as usize),
        };
        for _ in 0..REPETITIONS {
            stage.perform(operation, &mut took).await?;
        }
        callgrind::dump_stats(operation.name());
        println!("{} {}", operation.name(), took.median().as_nanos());
    }
    callgrind::stop_instrumentation();
    // Ending 100,000 calls one by one is not what is measured.
    std::process::exit(0)
}

/// Lets the tasks run that an operation has woken.
async fn settle() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}
