//! A tool that works for 5 s unless it is cancelled, and records its progress.

use std::{collections::BTreeMap, time::Duration};

use rmcp::{
    RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
};
use serde::Deserialize;
use tokio::{
    sync::watch,
    time::{Instant, interval},
};

use crate::disconnects::{End, Result, ToolLog};

const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 50;

/// The server with the tool.
#[derive(Clone)]
pub(crate) struct Worker {
    log: Log,
    tool_router: ToolRouter<Self>,
}

/// The tool's progress for each of its callers. Only the tool writes this.
#[derive(Clone, Default)]
pub(crate) struct Log(watch::Sender<BTreeMap<usize, Work>>);

#[derive(Clone, Copy)]
enum Work {
    Running { steps: u32 },
    Ended(End),
}

/// The part of the log for one of `callers` callers.
pub(crate) struct CallLog<'a> {
    pub(crate) log: &'a Log,
    pub(crate) caller: usize,
    pub(crate) callers: usize,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Job {
    caller: usize,
}

/// Returns the answer that the tool gives once it has finished.
pub(crate) fn answer(caller: usize) -> String {
    format!("finished for caller {caller}")
}

// === impl Worker ===

#[tool_router]
impl Worker {
    pub(crate) fn new(log: &Log) -> Self {
        Self {
            log: log.clone(),
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Works for 5 s, and stops when it is cancelled")]
    async fn work(
        &self,
        Parameters(Job { caller }): Parameters<Job>,
        context: RequestContext<RoleServer>,
    ) -> String {
        let mut step = interval(STEP);
        step.tick().await; // The first tick completes immediately.
        for steps in 0..STEPS {
            self.log.write(caller, Work::Running { steps });
            let stepped = context.ct.run_until_cancelled(step.tick()).await;
            if stepped.is_none() {
                let at = Instant::now();
                self.log.write(caller, Work::Ended(End::Cancelled { at }));
                return "cancelled".to_owned();
            }
        }
        let at = Instant::now();
        self.log.write(caller, Work::Ended(End::Finished { at }));
        answer(caller)
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Worker {}

// === impl Log ===

impl Log {
    fn write(&self, caller: usize, work: Work) {
        self.0.send_modify(|log| {
            log.insert(caller, work);
        });
    }
}

// === impl CallLog ===

impl ToolLog for CallLog<'_> {
    async fn wait_until_busy(&self) -> Result<()> {
        let is_busy = |work: &&Work| matches!(work, Work::Running { steps } if *steps >= 3);
        let mut log = self.log.0.subscribe();
        log.wait_for(|log| log.values().filter(is_busy).count() == self.callers)
            .await?;
        Ok(())
    }

    async fn wait_for_end(&self) -> Result<End> {
        let mut log = self.log.0.subscribe();
        loop {
            if let Some(Work::Ended(end)) = log.borrow_and_update().get(&self.caller) {
                return Ok(*end);
            }
            log.changed().await?;
        }
    }
}
