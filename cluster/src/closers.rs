//! Closes the sessions that are another instance's by now, or soon.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::mpsc;
use tracing::info;

use crate::{manager::Closes, sessions::Lost};

/// The session managers of an instance.
#[derive(Clone, Default)]
pub(crate) struct Closers(Arc<Mutex<Vec<Weak<dyn Closes>>>>);

// === impl Closers ===

impl Closers {
    pub(crate) fn add(&self, closes: Weak<dyn Closes>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(closes);
    }

    /// Closes what is lost, one session after the other.
    pub(crate) async fn run(self, mut lost: mpsc::UnboundedReceiver<Lost>) {
        while let Some(lost) = lost.recv().await {
            match lost.owner {
                Some(owner) => info!(
                    target: "mcp_cancel_cluster",
                    session = %lost.session, owner = %owner.address,
                    "a session is closed here, because it lives on another instance"
                ),
                None => info!(
                    target: "mcp_cancel_cluster",
                    session = %lost.session,
                    "a session is closed here, because this instance leaves and another asked for it"
                ),
            }
            let all = self
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            for closes in all.iter().filter_map(Weak::upgrade) {
                closes.close(&lost.id).await;
            }
        }
    }
}
