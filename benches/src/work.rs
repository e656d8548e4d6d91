//! What the programs in `work` do. They differ in their allocator only.

use std::env;

use tokio::runtime::{Builder, Runtime};

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
        let runtime = runtime()?;
        let (before, repetitions) = case.what.repetitions();
        let running = runtime.block_on(case.run())?;
        let mut work = Self {
            runtime,
            running,
            repetitions: before,
        };
        work.go()?;
        work.repetitions = repetitions;
        Ok(work)
    }

    pub fn repetitions(&self) -> u32 {
        self.repetitions
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
        Some((what, scene)) if what == "growth" => {
            runtime()?.block_on(growth::measure(scene.join(" ").parse()?))
        }
        _ => Err("usage: work-… calls CASE | growth SCENE".into()),
    }
}

pub fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}
