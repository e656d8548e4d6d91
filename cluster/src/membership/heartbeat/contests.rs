//! Resolves contested sessions.
//!
//! A session is *contested* if its record in the directory has a higher epoch and a different owner. The session serves nothing new until
//! the contest is resolved: it is relinquished if the other owner has a lease, and reclaimed if that owner provably has no lease.

use std::convert::Infallible;

use futures_util::{StreamExt as _, stream};
use tokio::time::timeout;

use super::{HEARTBEAT_INTERVAL, Heartbeat};
use crate::{
    directory::{Claim, Directory as _},
    ids::{Ownership, SessionHash},
    log::log,
};

/// Maximum number of contested sessions reclaimed concurrently.
const MAX_CONCURRENT_CLAIMS: usize = 64;

// === impl Heartbeat ===

impl Heartbeat {
    /// Resolves contested sessions, forever.
    pub(super) async fn run_contested(&self) -> Infallible {
        loop {
            self.resolve_contested().await;
            let _ = timeout(HEARTBEAT_INTERVAL, self.sessions.wait_until_contested()).await;
        }
    }

    /// Relinquishes contested sessions whose other owner has a lease, and reclaims the rest.
    ///
    /// A session is reclaimed only if its other owner provably has no lease. If the directory does not answer, this does nothing.
    async fn resolve_contested(&self) {
        let contested = self.sessions.contested();
        if contested.is_empty() {
            return;
        }
        let Ok(leases) = self.directory.leases().await else {
            return;
        };
        let has_lease = |ownership: &Ownership| leases.get(ownership.owner.incarnation).is_some();
        let (live_owner, dead_owner): (Vec<_>, Vec<_>) = contested
            .into_iter()
            .partition(|(_, ownership)| has_lease(ownership));
        for (session, ownership) in live_owner {
            self.sessions.relinquish_contested(session, ownership);
        }
        if self.proves_absence(&leases) {
            let claims = stream::iter(dead_owner);
            let claims = claims
                .for_each_concurrent(MAX_CONCURRENT_CLAIMS, |(session, previous)| {
                    self.reclaim(session, previous)
                });
            claims.await;
        }
    }

    /// Claims a contested session for this instance, and records the outcome.
    async fn reclaim(&self, session: SessionHash, previous: Ownership) {
        let wanted = previous.claimed_by(self.owner);
        match self.directory.claim(session, previous, wanted).await {
            Ok(Claim::Won) => {
                log(
                    || tracing::info!(target: "mcp_cancel_cluster", %session, former = %previous.owner.address, "session reclaimed because its owner has no lease"),
                );
                self.sessions.on_claimed(session, wanted.epoch);
            }
            Ok(Claim::Lost(record)) => self.sessions.on_found(session, record),
            Ok(Claim::Unknown) => self.sessions.write_again(session),
            // `run_contested` retries later.
            Err(_) => {}
        }
    }
}
