//! The work of the programs in `work`, which differ in their allocator only.

use anyhow::{Context, Result, bail};
use tokio::runtime::Runtime;

use crate::{
    case::{Case, Running},
    growth::{self, Scene},
    role, runtime, valgrind,
};

/// A case, ready to be asked.
pub struct Work {
    runtime: Runtime,
    running: Running,
}

// === impl Work ===

impl Work {
    /// Asks nothing yet.
    pub fn ready(case: Case) -> Result<Self> {
        let runtime = runtime()?;
        let running = runtime.block_on(case.run())?;
        Ok(Self { runtime, running })
    }

    /// Asks until what is kept of calls is as full as it gets.
    pub fn warm(case: Case) -> Result<Self> {
        let mut work = Self::ready(case)?;
        work.go(case.what.repetitions().0)?;
        Ok(work)
    }

    pub fn go(&mut self, times: u32) -> Result<()> {
        self.runtime.block_on(self.running.go(times))
    }
}

/// Does what the command line says and counts it.
pub fn main() -> Result<()> {
    let role = role();
    match role.split_once(' ') {
        Some(("calls", case)) => {
            let case = Case::named(case)?;
            let mut work = Work::warm(case)?;
            valgrind::counted(case.what.repetitions().1, |times| work.go(times))
        }
        Some(("ask", asked)) => {
            let (times, case) = asked.split_once(' ').context("ask how often?")?;
            Work::ready(Case::named(case)?)?.go(times.parse()?)
        }
        Some(("growth", scene)) => runtime()?.block_on(growth::measure(Scene::named(scene)?)),
        _ => bail!("usage: work-… calls CASE | ask TIMES CASE | growth SCENE"),
    }
}
