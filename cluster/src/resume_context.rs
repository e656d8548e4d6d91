//! The call of a resume, passed from the layer to the session manager.
//!
//! rmcp passes only the event id to the session manager, and the layer has already cut the id back to its plain form. Both run in one task.

use tokio::task_local;

use crate::ids::NamedCall;

task_local! {
    static CALL: Option<NamedCall>;
}

/// Serves a resume that named an event of this call.
pub(crate) async fn with_resumed_call<F: Future>(call: Option<NamedCall>, served: F) -> F::Output {
    CALL.scope(call, served).await
}

/// Returns the call of the resume that this task serves. `None` if there is none.
///
/// Also `None` if a layer in between moves requests to other tasks.
pub(crate) fn resumed_call() -> Option<NamedCall> {
    CALL.try_with(Clone::clone).ok().flatten()
}
