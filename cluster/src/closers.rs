//! Closes the sessions that do not live here any more: another instance has them, or is about to, or no client was given them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::mpsc;
use tracing::{debug, info};

use crate::{
    ids::Owner,
    manager::Closes,
    sessions::{Lost, Sessions, To},
};

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
            let session = lost.session;
            match lost.to {
                To::Owner(Owner { address, .. }) => {
                    info!(target: "mcp_cancel_cluster", %session, owner = %address, "a session is closed here, because it lives on another instance");
                }
                To::WhoeverAsks => {
                    info!(target: "mcp_cancel_cluster", %session, "a session is closed here, because this instance leaves and another asked for it");
                }
                To::Nobody => {
                    debug!(target: "mcp_cancel_cluster", %session, "a session does not begin: the directory does not know it, or this instance is gone");
                }
            }
            for closes in self.all().iter().filter_map(Weak::upgrade) {
                closes.close(&lost.id).await;
            }
            sessions.losses.was_closed(&lost);
        }
    }

    fn all(&self) -> Vec<Weak<dyn Closes>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }
}
