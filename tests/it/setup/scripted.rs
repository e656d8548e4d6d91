//! A server whose one tool does what a test says, for what the tools of `support` do not do.

use std::{fmt, future::ready, sync::Arc};

use futures_util::future::BoxFuture;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, CancelledNotificationParam,
        ContentBlock,
    },
    service::{NotificationContext, RequestContext},
};
use tokio::sync::mpsc;

use super::Tokens;
use crate::support::Witness;

/// What the tool answers.
type Answer = Result<String, ErrorData>;

type Script = dyn Fn(RequestContext<RoleServer>) -> BoxFuture<'static, Answer> + Send + Sync;

/// The server. Whatever tool is called, its script runs; the label in the arguments goes to the
/// witness.
#[derive(Clone)]
pub(crate) struct Scripted {
    pub(crate) witness: Witness,
    pub(crate) tokens: Tokens,
    script: Arc<Script>,
    cancels: Option<mpsc::UnboundedSender<CancelledNotificationParam>>,
}

// === impl Scripted ===

impl Scripted {
    /// A server whose tool runs `script`.
    pub(crate) fn new<F>(
        script: impl Fn(RequestContext<RoleServer>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        Self {
            witness: Witness::new(),
            tokens: Tokens::default(),
            script: Arc::new(move |context| Box::pin(script(context))),
            cancels: None,
        }
    }

    /// Hands on every `notifications/cancelled` that reaches the server.
    pub(crate) fn on_cancelled(
        mut self,
        cancels: mpsc::UnboundedSender<CancelledNotificationParam>,
    ) -> Self {
        self.cancels = Some(cancels);
        self
    }
}

impl ServerHandler for Scripted {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let label = request.arguments.as_ref().and_then(|arguments| {
            let label = arguments.get("label")?;
            label.as_str()
        });
        let label = label.unwrap_or_default();
        let running = self.witness.begin(label);
        self.tokens.note(label, &context);
        let answer = (self.script)(context).await;
        running.complete();
        let text = ContentBlock::text(answer?);
        Ok(CallToolResult::success(vec![text]).into())
    }

    fn on_cancelled(
        &self,
        cancelled: CancelledNotificationParam,
        _: NotificationContext<RoleServer>,
    ) -> impl Future<Output = ()> + Send + '_ {
        if let Some(cancels) = &self.cancels {
            // A test that has seen enough has gone.
            let _gone = cancels.send(cancelled);
        }
        ready(())
    }
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}
