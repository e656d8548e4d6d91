//! Records which task serves which session.
//!
//! When an rmcp task ends, it closes its session by id, even if another session has taken that id in the meantime
//! (`restored_session` in ARCHITECTURE.md, Workarounds). This record lets each task close only its own session.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use rmcp::transport::streamable_http_server::session::SessionId;
use tokio::task;

use super::session::Session;
use crate::lock::lock;

/// Maps each task serving a session to that session.
#[derive(Default)]
pub(super) struct ServeTasks(Mutex<HashMap<task::Id, ServedSession>>);

/// The session a task is serving. Weak, because a panicking task never removes its entry.
struct ServedSession {
    id: SessionId,
    session: Weak<Session>,
}

// === impl ServeTasks ===

impl ServeTasks {
    /// Records that the current task is serving a session.
    pub(super) fn begin(&self, session: &Arc<Session>) {
        if let Some(task) = task::try_id() {
            let mut tasks = lock(&self.0);
            if tasks.len() == tasks.capacity() {
                // Remove dead entries only when the map would otherwise grow, because `retain` visits every entry.
                tasks.retain(|_, served| served.session.strong_count() > 0);
                let live = tasks.len();
                tasks.reserve(live);
            }
            let served = ServedSession {
                id: session.id().clone(),
                session: Arc::downgrade(session),
            };
            tasks.insert(task, served);
        }
    }

    /// Removes and returns the session served by the current task, if its id is `id`.
    ///
    /// The session might have been closed in the meantime, even if the `Weak` can still be upgraded.
    pub(super) fn end(&self, id: &str) -> Option<Weak<Session>> {
        let task = task::try_id()?;
        let mut tasks = lock(&self.0);
        if *tasks.get(&task)?.id != *id {
            return None;
        }
        tasks.remove(&task).map(|served| served.session)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{runtime::Handle, time::Instant};

    use super::*;
    use crate::{
        call::{CallId, RequestId},
        exchange::Exchange,
        mcp::{early_stream_end::EarlyStreamEnds, idle::IdleTimeouts, session::Owner},
    };

    struct NoOwner;

    impl Owner for NoOwner {
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
        let tasks = Arc::new(ServeTasks::default());
        let session = |id: &str| {
            let owner = Weak::<NoOwner>::new();
            Session::new(
                id.into(),
                IdleTimeouts::default(),
                owner,
                EarlyStreamEnds::default(),
                Arc::default(),
            )
        };
        let kept = Arc::new(session("kept"));
        for _ in 0..3 {
            let (tasks, kept) = (tasks.clone(), kept.clone());
            let serves = async move { tasks.begin(&kept) };
            Handle::current().spawn(serves).await.unwrap();
        }
        for _ in 0..1_000 {
            let tasks = tasks.clone();
            let ended = Arc::new(session("ended"));
            let serves = async move { tasks.begin(&ended) };
            Handle::current().spawn(serves).await.unwrap();
        }
        let tasks = tasks.0.lock().unwrap();
        assert!(tasks.len() < 20, "{}", tasks.len());
        let live = tasks.values().filter(|served| *served.id == *"kept");
        assert_eq!(live.count(), 3);
    }
}
