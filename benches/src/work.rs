//! What the programs in `work` do. They differ in their allocator only.

use std::{env, time::Duration};

use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};

use crate::{
    Failure, callgrind,
    case::{Case, Running},
    growth,
};

/// A case, ready to be asked.
pub struct Work {
    runtime: Runtime,
    running: Running,
    repetitions: u32,
}

// === impl Work ===

impl Work {
    /// Asks until what is kept of calls is as full as it gets.
    pub fn warm(case: Case) -> Result<Self, Failure> {
        let (before, repetitions) = case.what.repetitions();
        let mut work = Self::ready(case, before)?;
        work.go()?;
        work.repetitions = repetitions;
        Ok(work)
    }

    /// Asks nothing yet.
    pub fn ready(case: Case, repetitions: u32) -> Result<Self, Failure> {
        let runtime = runtime()?;
        let running = runtime.block_on(case.run())?;
        Ok(Self {
            runtime,
            running,
            repetitions,
        })
    }

    pub fn repetitions(&self) -> u32 {
        self.repetitions
    }

    /// How long so many calls take.
    pub fn time(&mut self, times: u64) -> Result<Duration, Failure> {
        self.runtime.block_on(async {
            let start = Instant::now();
            for _ in 0..times {
                self.running.ask().await?;
            }
            Ok(start.elapsed())
        })
    }

    pub fn go(&mut self) -> Result<(), Failure> {
        self.runtime.block_on(async {
            for _ in 0..self.repetitions {
                self.running.ask().await?;
            }
            Ok(())
        })
    }
}

/// Does what the command line says and counts it.
pub fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.split_first() {
        Some((what, case)) if what == "calls" => {
            let mut work = Work::warm(case.join(" ").parse()?)?;
            callgrind::counted(|| work.go())
        }
        Some((what, [times, case @ ..])) if what == "ask" => {
            let times = times.parse()?;
            Work::ready(case.join(" ").parse()?, times)?.go()
        }
        Some((what, scene)) if what == "growth" => {
            runtime()?.block_on(growth::measure(scene.join(" ").parse()?))
        }
        _ => Err("usage: work-… calls CASE | ask TIMES CASE | growth SCENE".into()),
    }
}

pub fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}
