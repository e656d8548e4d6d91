//! The tasks that serve sessions.
//!
//! rmcp's task closes its session by the session's id when it ends. By then another session may have that id, if it was
//! restored while the handlers of the former one came to their end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use rmcp::transport::streamable_http_server::session::SessionId;
use tokio::task;

use super::session::Session;
use crate::lock::lock;

/// The tasks that serve sessions, and what each serves or has served.
#[derive(Default)]
pub(super) struct Serving(Mutex<HashMap<task::Id, Served>>);

/// A session that a task serves. A task that panicked closes nothing, so this does not keep the session.
struct Served {
    id: SessionId,
    session: Weak<Session>,
}

// === impl Serving ===

impl Serving {
    /// The current task serves a session.
    pub(super) fn begin(&self, session: &Arc<Session>) {
        if let Some(task) = task::try_id() {
            let mut serving = lock(&self.0);
            if serving.len() == serving.capacity() {
                // Before it grows, so that this is rare.
                serving.retain(|_, served| served.session.strong_count() > 0);
                let as_many_again = serving.len();
                serving.reserve(as_many_again);
            }
            let served = Served {
                id: session.id().clone(),
                session: Arc::downgrade(session),
            };
            serving.insert(task, served);
        }
    }

    /// The session with this id that the current task has served, if it has served one. The task is through with it; a
    /// session that is gone was closed.
    pub(super) fn end(&self, id: &str) -> Option<Weak<Session>> {
        let task = task::try_id()?;
        let mut serving = lock(&self.0);
        if *serving.get(&task)?.id != *id {
            return None;
        }
        serving.remove(&task).map(|served| served.session)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{runtime::Handle, time::Instant};

    use super::*;
    use crate::{
        call::{CallId, RequestId},
        exchange::Exchange,
        mcp::{passing::EarlyEnds, session::Owner},
    };

    struct Nobody;

    impl Owner for Nobody {
        fn is_awaited(&self, _session: &SessionId, _now: Instant) -> bool {
            false
        }

        fn call(
            &self,
            _session: &SessionId,
            _request: RequestId,
        ) -> Option<(CallId, Arc<Exchange>)> {
            None
        }

        fn close_idle(self: Arc<Self>, _session: SessionId) {}
    }

    #[tokio::test]
    async fn tasks_that_close_nothing_do_not_pile_up() {
        let serving = Arc::new(Serving::default());
        let session = |id: &str| {
            let owner = Weak::<Nobody>::new();
            Session::new(id.into(), None, owner, EarlyEnds::default(), Arc::default())
        };
        let kept = Arc::new(session("kept"));
        for _ in 0..3 {
            let (serving, kept) = (serving.clone(), kept.clone());
            let serves = async move { serving.begin(&kept) };
            Handle::current().spawn(serves).await.unwrap();
        }
        for _ in 0..1_000 {
            let serving = serving.clone();
            let gone = Arc::new(session("gone"));
            let serves = async move { serving.begin(&gone) };
            Handle::current().spawn(serves).await.unwrap();
        }
        let serving = serving.0.lock().unwrap();
        assert!(serving.len() < 20, "{}", serving.len());
        let live = serving.values().filter(|served| *served.id == *"kept");
        assert_eq!(live.count(), 3);
    }
}
