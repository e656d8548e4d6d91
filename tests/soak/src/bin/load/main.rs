//! The clients: raw ones that do what no proper client would, and real SDKs behind a proxy that cuts connections.
//!
//!     load LOG {"seed", "warm", "load", "actors", "ports": {"plain", "watched", "drained"}, "sdks": [{"name", "command", "sessions"}]}
//!
//! There are two rounds, each followed by a quiet period. What is left after the second round is compared with what was left after the
//! first. What a client does depends on nothing but the seed and its name.

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
    /// How long the first round takes, in seconds.
    warm: f64,
    /// How long the second round takes, in seconds.
    load: f64,
    actors: usize,
    ports: Ports,
    sdks: Vec<sdk::Program>,
    #[serde(default)]
    only: Only,
}

/// How long a story may take, even on a slow machine.
const STORY_TIMEOUT: Duration = Duration::from_secs(90);
/// A thread's stack size.
///
/// A story is one large future that an unoptimized build moves around, which overflows tokio's 2 MiB.
const STACK: usize = 16 * 1024 * 1024;
/// How long it takes until the gauges have been read.
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
        // By now all clients have closed. Sessions that were left open expire during this sleep.
        sleep(RETENTION + IDLE + Duration::from_secs(6)).await;
        world.log.write(Fact::Quiet);
        sleep(GAUGES).await;
    }
    Ok(())
}
