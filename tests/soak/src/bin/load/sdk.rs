//! Real SDKs as clients: the programs from `tests/interop`, each with a few concurrent calls.

use std::{
    collections::HashMap,
    error::Error,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use fastrand::Rng;
use serde::Deserialize;
use serde_json::{Value, json};
use soak::{
    fact::Fact,
    job::{Job, Reaction, answer},
    setup::Setup,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
    sync::{Mutex as AsyncMutex, mpsc},
    time::{Instant, sleep, timeout},
};

use crate::{
    connection::World,
    dice::{millis, weighted},
    proxy::Proxy,
};

/// How many calls an SDK makes concurrently.
pub(crate) const CELLS: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(12);

/// A program from `tests/interop` that runs an SDK.
#[derive(Deserialize)]
pub(crate) struct Program {
    name: String,
    command: Vec<String>,
    /// Whether its revision has sessions.
    sessions: bool,
}

/// A running program.
pub(crate) struct Sdk {
    program: Program,
    orders: AsyncMutex<ChildStdin>,
    cells: Cells,
    _process: Child,
}

/// Where the program's events are sent, by call.
type Cells = Arc<Mutex<HashMap<String, mpsc::UnboundedSender<Value>>>>;

/// What happens to the SDK during its call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Story {
    StaysConnected,
    IsCut,
    IsCutPermanently,
    Closes,
}

// === impl Sdk ===

impl Sdk {
    pub(crate) async fn start(program: Program) -> Result<Self, Box<dyn Error>> {
        let (command, args) = program.command.split_first().ok_or("a command")?;
        let mut command = Command::new(command);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // The programs log every connection that gets cut.
        command.stderr(Stdio::null()).kill_on_drop(true);
        for name in [
            "http_proxy",
            "https_proxy",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "all_proxy",
            "ALL_PROXY",
        ] {
            command.env_remove(name);
        }
        let mut process = command.spawn()?;
        let orders = process.stdin.take().ok_or("its standard input")?;
        let events = process.stdout.take().ok_or("its standard output")?;
        let mut events = BufReader::new(events).lines();
        timeout(Duration::from_secs(60), events.next_line())
            .await??
            .ok_or("it did not start")?;
        let cells = Cells::default();
        let to_cells = cells.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = events.next_line().await {
                let Ok(event) = serde_json::from_str::<Value>(&line) else {
                    continue;
                };
                let cells = to_cells.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(cell) = event["cell"].as_str().and_then(|cell| cells.get(cell)) {
                    let _sent = cell.send(event);
                }
            }
        });
        Ok(Self {
            program,
            orders: AsyncMutex::new(orders),
            cells,
            _process: process,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.program.name
    }

    /// Sends an order to the program, unless the program has already exited.
    async fn order(&self, order: Value) {
        let line = format!("{order}\n");
        let _sent = self.orders.lock().await.write_all(line.as_bytes()).await;
    }
}

/// Makes one call after another until its time is up.
pub(crate) async fn run(
    sdk: Arc<Sdk>,
    world: Arc<World>,
    name: String,
    mut dice: Rng,
    end: Instant,
) {
    let mut turn = 0;
    while Instant::now() < end {
        turn += 1;
        let routes: &[_] = if sdk.program.sessions {
            &[(4, "wrapped"), (3, "layer"), (1, "abort")]
        } else {
            &[(2, "wrapped"), (1, "layer"), (2, "stateless")]
        };
        let setup = Setup::of(weighted(&mut dice, routes)).expect("a route of the server");
        let job = Job {
            name: format!("{name}.{turn}"),
            work: millis(&mut dice, 1_500..4_500),
            steps: dice.u32(..3),
            reaction: Reaction::EndsOnToken,
        };
        if call(&sdk, &world, setup, &job, &mut dice).await.is_none() {
            sleep(Duration::from_secs(1)).await;
        }
        sleep(millis(&mut dice, 50..500)).await;
    }
}

/// Makes one call through a proxy of its own, and records the outcome. Returns `None` if the proxy cannot start.
async fn call(
    sdk: &Sdk,
    world: &Arc<World>,
    setup: &'static Setup,
    job: &Job,
    dice: &mut Rng,
) -> Option<()> {
    use Story::*;
    let cell = job.to_string();
    let bytes = dice.usize(100..3_000);
    let story = weighted(
        dice,
        &[
            (3, StaysConnected),
            (4, IsCut),
            (2, IsCutPermanently),
            (1, Closes),
        ],
    );
    let proxy = Proxy::start(world, setup, &cell, sdk.name()).await.ok()?;
    let (sender, mut events) = mpsc::unbounded_channel();
    let cells = || sdk.cells.lock().unwrap_or_else(PoisonError::into_inner);
    cells().insert(cell.clone(), sender);

    let url = format!("http://{}/{}", proxy.address, setup.route);
    let arguments = json!({"cell": cell, "bytes": bytes});
    sdk.order(
        json!({"open": cell, "url": url, "arguments": arguments, "timeout": TIMEOUT.as_secs()}),
    )
    .await;
    let call_passed = timeout(TIMEOUT, proxy.call_passed()).await.is_ok();
    let delay = millis(dice, 0..job.work.as_millis() as u64 / 2);
    let mut outcome = None;
    if call_passed && story != StaysConnected {
        tokio::select! {
            () = sleep(delay) => match story {
                IsCut | StaysConnected => proxy.cut(),
                IsCutPermanently => proxy.refuse(),
                Closes => sdk.order(json!({"close": cell})).await,
            },
            event = events.recv() => outcome = event,
        }
    }
    if call_passed && outcome.is_none() && story != IsCutPermanently && story != Closes {
        outcome = timeout(TIMEOUT, events.recv()).await.ok().flatten();
    }
    if let Some(event) = outcome.filter(|event| event["event"] == "outcome") {
        let whole = answer(&cell, bytes);
        world.log.write(Fact::Outcome {
            call: cell.as_str().into(),
            // A correct long answer is replaced with its name.
            text: event["text"].as_str().map(|text| {
                if text == whole {
                    cell.clone()
                } else {
                    text.to_owned()
                }
            }),
            error: event["error"].as_str().map(str::to_owned),
        });
    }
    if story != Closes {
        sdk.order(json!({"close": cell})).await;
    }
    let closed = async {
        while events
            .recv()
            .await
            .is_some_and(|event| event["event"] != "closed")
        {}
    };
    let _slow = timeout(Duration::from_secs(3), closed).await;
    cells().remove(&cell);
    let _stuck = timeout(Duration::from_secs(3), proxy.end()).await;
    Some(())
}
