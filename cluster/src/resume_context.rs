//! The call that a resume is for, handed from the layer to the session manager.
//!
//! rmcp hands the session manager the event id alone, which the layer has cut back to what the manager knows. Both run in
//! one task.

use tokio::task_local;

use crate::ids::NamedCall;

task_local! {
    static CALL: Option<NamedCall>;
}

/// Serves a resume that named an event of this call.
pub(crate) async fn with_resumed_call<F: Future>(call: Option<NamedCall>, served: F) -> F::Output {
    CALL.scope(call, served).await
}

/// The call that the resume which is served now is for. `None` if it is for none, or if something between the layer and the
/// session manager moves requests to tasks of their own.
pub(crate) fn resumed_call() -> Option<NamedCall> {
    CALL.try_with(Clone::clone).ok().flatten()
}
