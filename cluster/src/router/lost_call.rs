//! Answers for calls that ended with their instance.

use std::time::Duration;

use axum::body::Body;
use http::Response;

use super::Router;
use crate::{
    directory::Directory as _, ids::Record, resume::LostCall, routing_plan::Refusal,
    shutdown::FLUSH_TIMEOUT,
};

/// How long a living instance may still run a call after another instance has claimed the session: 10 s.
///
/// Chosen because it learns of the claim by its next heartbeat, closes the session, and writes the answers.
const LOSS_TIMEOUT: Duration = FLUSH_TIMEOUT.saturating_add(Duration::from_secs(8));

// === impl Router ===

impl Router {
    /// Answers for a call that ended with its instance. Replaces the response of the application.
    pub(crate) async fn answer(&self, lost: &LostCall, accepted: Response<Body>) -> Response<Body> {
        let (directory, session) = (&self.directory, lost.session);
        let find = || directory.answer(session, lost.incarnation, lost.number);
        let mut kept = find().await;
        if matches!(kept, Ok(None)) {
            if self.may_be_running(lost).await || !self.heartbeat.has_all_answers().await {
                return self.reject(Refusal::NotSound);
            }
            // The former instance may have written the answer before it renewed the lease that was just read.
            kept = find().await;
        }
        match kept {
            Ok(kept) => lost.answer(accepted, kept.as_ref()),
            Err(_) => self.reject(Refusal::NotSound),
        }
    }

    /// Returns `true` if a call may still be running: another instance owns its session by now, or this one claimed it a moment ago from an
    /// instance that still has its lease.
    async fn may_be_running(&self, lost: &LostCall) -> bool {
        let Ok(look) = self.directory.look(lost.session).await else {
            return true;
        };
        match look.record {
            Some(Record::Owned(is)) if is.owner != self.me => true,
            _ => {
                look.leases.of(lost.incarnation).is_some()
                    && !self.sessions.is_owned_for(lost.session, LOSS_TIMEOUT)
            }
        }
    }
}
