//! Closes relinquished sessions that are still open here. [`RelinquishedTo`] lists the reasons for relinquishing a session.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, stream};
use tokio::{sync::mpsc, time::timeout};
use tracing::{debug, info, warn};

use crate::{
    ids::Owner,
    lock::lock,
    log::log,
    manager::CloseSession,
    sessions::{Relinquished, RelinquishedTo, Sessions},
};

/// Timeout for closing a session at one manager. Requests that would restore the session wait until it has been closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of sessions being closed at the same time.
const MAX_CLOSES: usize = 64;

/// An instance's session managers.
#[derive(Clone, Default)]
pub(crate) struct SessionClosers(Arc<Mutex<Vec<Weak<dyn CloseSession>>>>);

// === impl SessionClosers ===

impl SessionClosers {
    pub(crate) fn add(&self, closer: Weak<dyn CloseSession>) {
        lock(&self.0).push(closer);
    }

    /// Returns `true` if any of the managers has the session.
    pub(crate) async fn has_session(&self, session: &str) -> bool {
        for closer in self.closers().iter().filter_map(Weak::upgrade) {
            if closer.has(session).await {
                return true;
            }
        }
        false
    }

    /// Closes relinquished sessions, up to [`MAX_CLOSES`] at a time.
    pub(crate) async fn run(
        self,
        mut relinquished: mpsc::UnboundedReceiver<Relinquished>,
        sessions: Arc<Sessions>,
    ) {
        let relinquished = stream::poll_fn(|cx| relinquished.poll_recv(cx));
        let closes = relinquished.for_each_concurrent(MAX_CLOSES, async |relinquished| {
            log_reason(&relinquished);
            for closer in self.closers().iter().filter_map(Weak::upgrade) {
                close(closer, &relinquished).await;
            }
            sessions.relinquished.on_closed(&relinquished);
        });
        closes.await;
    }

    fn closers(&self) -> Vec<Weak<dyn CloseSession>> {
        lock(&self.0).clone()
    }
}

fn log_reason(relinquished: &Relinquished) {
    let session = relinquished.session;
    log(|| match relinquished.to {
        RelinquishedTo::Owner(Owner { address, .. }) => {
            info!(target: "mcp_cancel_cluster", %session, owner = %address, "closing a session here because another instance owns it");
        }
        RelinquishedTo::AnyClaimer => {
            info!(target: "mcp_cancel_cluster", %session, "closing a session here because this instance is shutting down and another one is taking it over");
        }
        RelinquishedTo::Ended => {
            info!(target: "mcp_cancel_cluster", %session, "closing a session here because it has ended elsewhere");
        }
        RelinquishedTo::RestoreRetry => {
            info!(target: "mcp_cancel_cluster", %session, "closing a session here because it could not be restored; the next request will try again");
        }
        RelinquishedTo::NoClient => {
            debug!(target: "mcp_cancel_cluster", %session, "closing a new session because the directory does not have it, or this instance has shut down");
        }
    });
}

/// Closes a session at one manager, which may not have it.
///
/// Logs a warning if the manager panics or exceeds [`CLOSE_TIMEOUT`].
async fn close(closer: Arc<dyn CloseSession>, relinquished: &Relinquished) {
    let session = relinquished.session;
    // The timeout is inside `catch_unwind` because dropping the future runs destructors, which may panic too.
    let closing = async { timeout(CLOSE_TIMEOUT, closer.close(&relinquished.id)).await };
    match AssertUnwindSafe(closing).catch_unwind().await {
        Ok(Ok(())) => {}
        Ok(Err(_elapsed)) => log(
            || warn!(target: "mcp_cancel_cluster", %session, "a session has not been closed here: its manager is taking too long"),
        ),
        Err(_panic) => log(
            || warn!(target: "mcp_cancel_cluster", %session, "a session might not have been closed here: its manager panicked"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use async_trait::async_trait;

    use super::*;
    use crate::ids::{Incarnation, SessionHash};

    /// Closes sessions, except those whose id names a fault: it hangs, panics, or panics when dropped.
    struct FaultyCloser;

    struct PanicsOnDrop;

    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }

    #[async_trait]
    impl CloseSession for FaultyCloser {
        async fn has(&self, _: &str) -> bool {
            true
        }

        async fn close(&self, session: &str) {
            match session {
                "hangs" | "hangs too" => pending().await,
                "panics" => panic!("on purpose"),
                "panics on drop" => {
                    let _panics = PanicsOnDrop;
                    pending().await
                }
                _ => {}
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_is_never_closed_delays_others_for_a_limited_time() {
        let session_closers = SessionClosers::default();
        let closer: Arc<dyn CloseSession> = Arc::new(FaultyCloser);
        session_closers.add(Arc::downgrade(&closer));
        let (sessions, relinquished) = Sessions::new(Incarnation::random());
        let ids = ["hangs", "hangs too", "panics", "panics on drop", "other"];
        for id in ids {
            sessions.relinquished.notify(Relinquished {
                id: id.into(),
                session: SessionHash::of(id),
                to: RelinquishedTo::NoClient,
            });
        }
        let all_closed = async {
            for id in ids {
                sessions
                    .relinquished
                    .wait_until_closed(SessionHash::of(id))
                    .await;
            }
        };
        tokio::select! {
            () = session_closers.run(relinquished, sessions.clone()) => unreachable!(),
            result = timeout(CLOSE_TIMEOUT + Duration::from_secs(1), all_closed) => result.unwrap(),
        }
    }
}
