//! The handler, which works as its job requires and records how it ended.

use std::{sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::CallToken;
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::ProgressNotificationParam,
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
};
use serde::Deserialize;
use soak::{
    fact::{Call, Fact, Log},
    job::{self, FLOOD, Job, Reaction},
};
use tokio::time::{Instant, sleep_until};

/// The handler behind all routes.
///
/// Jobs that ignore their tokens only exist with `AbortOnCancel`, which stops such handlers.
#[derive(Clone)]
pub(crate) struct Worker {
    log: Log,
    tool_router: ToolRouter<Self>,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Order {
    /// The call's name, which contains the job.
    cell: String,
    /// Length of the answer.
    bytes: usize,
}

/// Records, when dropped, that the handler did not get to its end.
struct Witness {
    log: Log,
    call: Call,
    has_ended: bool,
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

    #[tool(description = "Works as long as its name says")]
    async fn work(
        &self,
        Parameters(Order { cell, bytes }): Parameters<Order>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, String> {
        let job: Job = cell.parse()?;
        let mut witness = Witness::new(&self.log, &cell);
        let work = async {
            let started = Instant::now();
            for step in 1..=job.steps {
                sleep_until(started + job.work * step / (job.steps + 1)).await;
                report(step, &job, &context).await;
                self.log.write(Fact::Progressed {
                    call: witness.call.clone(),
                });
            }
            sleep_until(started + job.work).await;
        };
        let done = match job.reaction {
            Reaction::IgnoresToken => {
                work.await;
                true
            }
            Reaction::EndsOnToken | Reaction::Floods => {
                let finished = context.ct.run_until_cancelled(work).await;
                finished.is_some()
            }
        };
        let call = witness.call.clone();
        witness.has_ended = true;
        if !done {
            let reason = CallToken::of(&context).and_then(|token| token.reason());
            let reason = reason.map(|reason| reason.to_string());
            self.log.write(Fact::Token { call, reason });
            return Err("cancelled".to_owned());
        }
        self.log.write(Fact::Answered { call });
        Ok(job::answer(&cell, bytes))
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Worker {}

async fn report(step: u32, job: &Job, context: &RequestContext<RoleServer>) {
    let Some(token) = context.meta.get_progress_token() else {
        return;
    };
    let mut progress = ProgressNotificationParam::new(token, step.into());
    if job.reaction == Reaction::Floods {
        progress = progress.with_message("x".repeat(FLOOD));
    }
    // A client that does not read must not keep the handler from checking its token.
    let notify = context.peer.notify_progress(progress);
    let _result = tokio::time::timeout(Duration::from_millis(100), notify).await;
}

// === impl Witness ===

impl Witness {
    fn new(log: &Log, cell: &str) -> Self {
        let call: Call = Arc::from(cell);
        log.write(Fact::Started { call: call.clone() });
        Self {
            log: log.clone(),
            call,
            has_ended: false,
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if !self.has_ended {
            self.log.write(Fact::Dropped {
                call: self.call.clone(),
            });
        }
    }
}
