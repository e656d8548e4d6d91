//! The clients: raw ones that do what no proper client does, and real SDKs behind a proxy that cuts connections.
//!
//!     load LOG {"seed", "warm", "load", "actors", "ports": {"plain", "watched", "drained"}, "sdks": [{"name", "command", "sessions"}]}
//!
//! There are two rounds, each followed by a quiet period. The remains of the second round are compared with those of
//! the first. The seed and a client's name alone determine what the client does.

use std::{error::Error, path::Path, sync::Arc, time::Duration};

use serde::Deserialize;
use soak::{
    fact::{Fact, Log},
    pulse,
    setup::{IDLE, RETENTION},
};
use tokio::{
    runtime::Builder,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use self::{
    connection::{Ports, World},
    dice::Only,
    sdk::Sdk,
};

mod actor;
mod call;
mod connection;
mod dice;
mod proxy;
mod sdk;
mod session;
mod story;

/// What the load does.
#[derive(Deserialize)]
struct Plan {
    seed: u64,
    /// Seconds of the first round.
    warm: f64,
    /// Seconds of the second.
    load: f64,
    actors: usize,
    ports: Ports,
    sdks: Vec<sdk::Program>,
    #[serde(default)]
    only: Only,
}

/// Maximum duration of a story, on a slow machine.
const STORY_TIMEOUT: Duration = Duration::from_secs(90);
/// Stack size of a thread: 16 MiB.
///
/// Chosen because a story is one large future that an unoptimized build moves around, which overflows tokio's 2 MiB.
const STACK: usize = 16 * 1024 * 1024;
/// Time until the gauges have been read.
const GAUGES: Duration = Duration::from_millis(2_500);

fn main() -> Result<(), Box<dyn Error>> {
    Builder::new_multi_thread()
        .worker_threads(2)
        .thread_stack_size(STACK)
        .enable_all()
        .build()?
        .block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(plan)) = (args.next(), args.next()) else {
        return Err("usage: load LOG PLAN".into());
    };
    let plan: Plan = serde_json::from_str(&plan)?;
    let log = Log::append(Path::new(&path))?;
    pulse::watch(&log);
    log.write(Fact::Seed { seed: plan.seed });
    let world = Arc::new(World::new(log, plan.ports, plan.only));
    let mut sdks = Vec::new();
    for program in plan.sdks {
        sdks.push(Arc::new(Sdk::start(program).await?));
    }

    for (round, seconds) in [plan.warm, plan.load].into_iter().enumerate() {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let mut clients = JoinSet::new();
        for number in 0..plan.actors {
            let dice = dice::of(plan.seed, round, &format!("raw{number}"));
            clients.spawn(actor::run(
                world.clone(),
                format!("r{round}a{number}"),
                dice,
                end,
            ));
        }
        for sdk in &sdks {
            for number in 0..sdk::CELLS {
                let name = format!("r{round}{}-{number}", sdk.name());
                let dice = dice::of(plan.seed, round, &name);
                clients.spawn(sdk::run(sdk.clone(), world.clone(), name, dice, end));
            }
        }
        let all = async { while clients.join_next().await.is_some() {} };
        let limit = Duration::from_secs_f64(seconds) + STORY_TIMEOUT;
        timeout(limit, all)
            .await
            .map_err(|_| "some clients have not ended 90 s after their round")?;
        // All clients have closed. Sessions that were left open expire in that time.
        sleep(RETENTION + IDLE + Duration::from_secs(6)).await;
        world.log.write(Fact::Quiet);
        sleep(GAUGES).await;
    }
    Ok(())
}
