//! Passes facts about a request from the layer to the session manager and the session store.
//!
//! rmcp does not pass them the request (`resume_context` in ARCHITECTURE.md, Workarounds), and the layer has already rewritten the event id
//! to its plain form. The values are task-local, so no layer in between may move a request to another task.

use std::cell::Cell;

use tokio::task_local;

use crate::ids::{Incarnation, NamedCall};

task_local! {
    static RESUMED_CALL: (Incarnation, Option<NamedCall>);
    static HAS_NO_SESSION: ();
    static MAY_RESTORE: ();
    static IS_RESUMED: Cell<bool>;
}

/// Serves a request that resumes a lost call. The `bool` indicates whether the session manager resumed the session.
///
/// If it did, the application accepted the request.
pub(crate) async fn with_resume_recorded<F: Future>(response: F) -> (F::Output, bool) {
    let serving = async { (response.await, IS_RESUMED.with(Cell::get)) };
    IS_RESUMED.scope(Cell::new(false), serving).await
}

/// Called when the session manager resumes a session.
pub(crate) fn on_resumed() {
    // The value is set only while a request to resume a lost call is being served.
    let _ = IS_RESUMED.try_with(|is_resumed| is_resumed.set(true));
}

/// Serves a request that resumes from one of `call`'s events.
///
/// `generation` is the event's generation of the session.
pub(crate) async fn with_resumed_call<F: Future>(
    generation: Incarnation,
    call: Option<NamedCall>,
    response: F,
) -> F::Output {
    RESUMED_CALL.scope((generation, call), response).await
}

/// Returns the generation and the call that this task is resuming, if any.
///
/// Returns `None` unless this task is serving a request that resumes from an event in the session's current generation.
pub(crate) fn resumed_call() -> Option<(Incarnation, Option<NamedCall>)> {
    RESUMED_CALL.try_with(Clone::clone).ok()
}

/// Serves a request whose session provably does not exist.
pub(crate) async fn without_session<F: Future>(response: F) -> F::Output {
    HAS_NO_SESSION.scope((), response).await
}

/// Returns `true` if this task is serving a request whose session provably does not exist.
pub(crate) fn has_no_session() -> bool {
    HAS_NO_SESSION.try_with(|()| ()).is_ok()
}

/// Polls a request that restores its session, or the body of its response.
///
/// This instance must already have claimed the session.
pub(crate) fn poll_restore<T>(poll: impl FnOnce() -> T) -> T {
    MAY_RESTORE.sync_scope((), poll)
}

/// Returns `true` if this task is serving the request that restores its session.
pub(crate) fn may_restore() -> bool {
    MAY_RESTORE.try_with(|()| ()).is_ok()
}
