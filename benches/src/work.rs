//! The code shared by the programs in `work`, which only differ in their allocator.

use anyhow::{Context, Result, bail};
use tokio::runtime::Runtime;

use crate::{
    case::{Case, Running},
    growth::{self, Scene},
    role, runtime, valgrind,
};

/// A case whose server is running.
pub struct Work {
    runtime: Runtime,
    running: Running,
}

// === impl Work ===

impl Work {
    /// Starts the server and its client without sending a measured request yet.
    pub fn ready(case: Case) -> Result<Self> {
        let runtime = runtime()?;
        let running = runtime.block_on(case.run())?;
        Ok(Self { runtime, running })
    }

    /// Sends requests until the queue of retained calls has reached its full size.
    pub fn warm(case: Case) -> Result<Self> {
        let mut work = Self::ready(case)?;
        work.run(case.what.repetitions().0)?;
        Ok(work)
    }

    pub fn run(&mut self, times: u32) -> Result<()> {
        self.runtime.block_on(self.running.run(times))
    }
}

/// Executes the command line: `calls CASE`, `ask TIMES CASE` or `growth SCENE`.
pub fn main() -> Result<()> {
    let role = role();
    match role.split_once(' ') {
        Some(("calls", case)) => {
            let case = Case::named(case)?;
            let mut work = Work::warm(case)?;
            valgrind::counted(case.what.repetitions().1, |times| work.run(times))
        }
        Some(("ask", requests)) => {
            let (times, case) = requests.split_once(' ').context("no TIMES")?;
            Work::ready(Case::named(case)?)?.run(times.parse()?)
        }
        Some(("growth", scene)) => runtime()?.block_on(growth::measure(Scene::named(scene)?)),
        _ => bail!("usage: work-… calls CASE | ask TIMES CASE | growth SCENE"),
    }
}
