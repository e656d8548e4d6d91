//! A server whose tool runs the test's script, for what the tools in `support` cannot do.

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

/// The tool's answer.
type Answer = Result<String, ErrorData>;

type Script =
    dyn Fn(String, RequestContext<RoleServer>) -> BoxFuture<'static, Answer> + Send + Sync;

/// The server.
///
/// Any tool name runs the script, and the witness gets the label from the arguments. Only `echo` answers at once, as in
/// [`Tools`](crate::support::Tools). A script that returns an error counts as completed, too.
#[derive(Clone)]
pub(crate) struct Scripted {
    pub(crate) witness: Witness,
    pub(crate) tokens: Tokens,
    script: Arc<Script>,
    cancels: Option<mpsc::UnboundedSender<CancelledNotificationParam>>,
}

// === impl Scripted ===

impl Scripted {
    /// Returns a server whose tool runs `script`.
    pub(crate) fn new<F>(
        script: impl Fn(RequestContext<RoleServer>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        Self::labelled(move |_, context| script(context))
    }

    /// Returns a server whose tool passes the label from its arguments to `script`.
    pub(crate) fn labelled<F>(
        script: impl Fn(String, RequestContext<RoleServer>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        Self {
            witness: Witness::new(),
            tokens: Tokens::default(),
            script: Arc::new(move |label, context| Box::pin(script(label, context))),
            cancels: None,
        }
    }

    /// Forwards every `notifications/cancelled` that reaches the server.
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
        let argument = |name| {
            let arguments = request.arguments.as_ref();
            let argument = arguments.and_then(|arguments| arguments.get(name)?.as_str());
            argument.unwrap_or_default()
        };
        if request.name == "echo" {
            let text = ContentBlock::text(argument("text"));
            return Ok(CallToolResult::success(vec![text]).into());
        }
        let label = argument("label");
        let running = self.witness.begin(label);
        self.tokens.record(label, &context);
        let answer = (self.script)(label.to_owned(), context).await;
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
            // The test might have dropped its receiver.
            let _ = cancels.send(cancelled);
        }
        ready(())
    }
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}
