//! Answers requests to resume calls that were lost with their instance.

use std::{sync::Mutex, time::Duration};

use axum::body::Body;
use http::Response;
use tokio::time::Instant;

use super::Router;
use crate::{
    directory::{Directory as _, SessionSnapshot},
    ids::{Incarnation, Record, SessionHash},
    lock::lock,
    refusals::Refusal,
    routing::resume::LostCall,
    ttl_cache::TtlCache,
};

/// How long a former owner that kept its lease may go on running calls after a claim.
///
/// The former owner notices the claim after its next heartbeat, and then closes the session and writes the answers. A former owner without
/// a lease notices the claim before it reports its sessions as written, and it reports late answers until it has closed the session
/// ([`Heartbeat::has_all_answers`](crate::membership::heartbeat::Heartbeat::has_all_answers)).
const FORMER_OWNER_TTL: Duration = Duration::from_secs(10);

/// Maximum number of former owners to remember.
const MAX_FORMER_OWNERS: usize = 16 * 1024;

/// Former owners of the sessions claimed by this instance within [`FORMER_OWNER_TTL`].
#[derive(Debug)]
pub(crate) struct FormerOwners(Mutex<TtlCache<Incarnation>>);

// === impl FormerOwners ===

impl FormerOwners {
    pub(super) fn record(&self, session: SessionHash, owner: Incarnation) {
        lock(&self.0).insert(session, owner, Instant::now());
    }

    fn get(&self, session: SessionHash) -> Option<Incarnation> {
        lock(&self.0).get(session, Instant::now()).copied()
    }
}

impl Default for FormerOwners {
    fn default() -> Self {
        Self(Mutex::new(TtlCache::new(
            MAX_FORMER_OWNERS,
            FORMER_OWNER_TTL,
        )))
    }
}

// === impl Router ===

impl Router {
    /// Answers a request to resume a lost call, instead of the application.
    ///
    /// Asks the client to retry if the directory does not answer, or if a missing answer might still be written.
    pub(crate) async fn answer(&self, lost: &LostCall, accepted: Response<Body>) -> Response<Body> {
        let (directory, session) = (&self.directory, lost.session);
        let read_answer = || directory.answer(session, lost.incarnation, lost.number);
        let mut stored = read_answer().await;
        if matches!(stored, Ok(None)) {
            let snapshot = directory.look_up(session).await;
            if !snapshot.is_ok_and(|snapshot| self.former_calls_have_ended(session, &snapshot)) {
                return self.reject(Refusal::OwnerUnknown);
            }
            // Read again, in case the former owner wrote the answer between the first read and the lookup.
            stored = read_answer().await;
        }
        match stored {
            Ok(stored) => lost.answer(accepted, stored.as_ref()),
            Err(_) => self.reject(Refusal::OwnerUnknown),
        }
    }

    /// Returns `true` if the calls run by a session's former owners have ended.
    ///
    /// By then, all of their answers are in the directory, except those that were lost.
    ///
    /// One of these calls may still be running if another instance now owns the session, or if this instance claimed the session less than
    /// [`FORMER_OWNER_TTL`] ago from an instance that still has its lease.
    fn former_calls_have_ended(&self, session: SessionHash, snapshot: &SessionSnapshot) -> bool {
        let has_other_owner = matches!(snapshot.record, Some(Record::Owned(ownership)) if ownership.owner != self.this_instance);
        let has_lease = |former| snapshot.leases.get(former).is_some();
        let is_former_alive = self.former_owners.get(session).is_some_and(has_lease);
        !has_other_owner && !is_former_alive && self.heartbeat.has_all_answers(&snapshot.leases)
    }
}
