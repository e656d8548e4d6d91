//! Closes the sessions that do not live here any more: another instance has them, or is about to, or no client was given them.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{sync::mpsc, time::timeout};
use tracing::{debug, info, warn};

use crate::{
    ids::Owner,
    log::log,
    manager::Closes,
    sessions::{Lost, Sessions, To},
};

/// How long a session manager may take to close a session: 5 s. Others wait for it, and requests of the session, if it comes back.
const CLOSES_WITHIN: Duration = Duration::from_secs(5);

/// The session managers of an instance.
#[derive(Clone, Default)]
pub(crate) struct Closers(Arc<Mutex<Vec<Weak<dyn Closes>>>>);

// === impl Closers ===

impl Closers {
    pub(crate) fn add(&self, closes: Weak<dyn Closes>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(closes);
    }

    /// Whether one of them has a session.
    pub(crate) async fn have(&self, session: &str) -> bool {
        for closes in self.all().iter().filter_map(Weak::upgrade) {
            if closes.has(session).await {
                return true;
            }
        }
        false
    }

    /// Closes what is lost, one session after the other.
    pub(crate) async fn run(
        self,
        mut lost: mpsc::UnboundedReceiver<Lost>,
        sessions: Arc<Sessions>,
    ) {
        while let Some(lost) = lost.recv().await {
            announce(&lost);
            for closes in self.all().iter().filter_map(Weak::upgrade) {
                close(closes, &lost).await;
            }
            sessions.losses.was_closed(&lost);
        }
    }

    fn all(&self) -> Vec<Weak<dyn Closes>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }
}

/// Says which session is closed here, and why.
fn announce(lost: &Lost) {
    let session = lost.session;
    log(|| match lost.to {
        To::Owner(Owner { address, .. }) => {
            info!(target: "mcp_cancel_cluster", %session, owner = %address, "a session is closed here, because it lives on another instance");
        }
        To::WhoeverAsks => {
            info!(target: "mcp_cancel_cluster", %session, "a session is closed here, because this instance leaves and another asked for it");
        }
        To::Ended => {
            info!(target: "mcp_cancel_cluster", %session, "a session is closed here, because its client ended it through another instance");
        }
        To::NextRequest => {
            info!(target: "mcp_cancel_cluster", %session, "a session is closed here, because it was restored in vain: the next request restores it again");
        }
        To::Nobody => {
            debug!(target: "mcp_cancel_cluster", %session, "a session does not begin: the directory does not know it, or this instance is gone");
        }
    });
}

/// Closes a session at one of the managers, which may have it.
async fn close(closes: Arc<dyn Closes>, lost: &Lost) {
    let closed = AssertUnwindSafe(closes.close(&lost.id)).catch_unwind();
    let session = lost.session;
    match timeout(CLOSES_WITHIN, closed).await {
        Ok(Ok(())) => {}
        Ok(Err(_panic)) => log(
            || warn!(target: "mcp_cancel_cluster", %session, "a session that does not live here may not be closed: its manager panicked"),
        ),
        Err(_) => log(
            || warn!(target: "mcp_cancel_cluster", %session, "a session that does not live here is not closed: its manager takes too long"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use async_trait::async_trait;

    use super::*;
    use crate::ids::{Incarnation, SessionHash};

    /// Closes every session but one, at which it never ends.
    struct Stuck;

    #[async_trait]
    impl Closes for Stuck {
        async fn has(&self, _: &str) -> bool {
            true
        }

        async fn close(&self, session: &str) {
            if session == "stuck" {
                pending().await
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_is_never_closed_holds_up_none_for_ever() {
        let closers = Closers::default();
        let stuck: Arc<dyn Closes> = Arc::new(Stuck);
        closers.add(Arc::downgrade(&stuck));
        let (sessions, told) = Sessions::new(Incarnation::random());
        let ids = ["stuck", "other"];
        for id in ids {
            sessions.losses.tell(Lost {
                id: id.into(),
                session: SessionHash::of(id),
                to: To::Nobody,
            });
        }
        let ended = async {
            for id in ids {
                sessions.losses.until_closed(SessionHash::of(id)).await;
            }
        };
        tokio::select! {
            () = closers.run(told, sessions.clone()) => unreachable!(),
            ended = timeout(2 * CLOSES_WITHIN, ended) => ended.unwrap(),
        }
    }
}
