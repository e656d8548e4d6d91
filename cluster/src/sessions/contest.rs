//! Handles contested sessions.
//!
//! A session is contested if the directory has another owner's record for it, at a higher epoch.
//!
//! Until the heartbeat task has decided who owns it, a contested session serves nothing new, but its calls keep running. If the other owner
//! has its lease, the session is relinquished to it. If that owner provably has no lease, the session is reclaimed.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::{contested::Contested, lapse::Lapse, relinquished::RelinquishedTo, state::Sessions};
use crate::{
    ids::{Epoch, Ownership, Record, SessionHash},
    lock::lock,
};

// === impl Sessions ===

impl Sessions {
    /// Called when this instance has claimed a session. A local session is then no longer contested.
    pub(crate) fn on_claimed(&self, session: SessionHash, epoch: Epoch) {
        if let Some(local) = self.shard(session).get_mut(&session) {
            local.on_written(Instant::now(), Some(epoch));
        }
    }

    /// Called with the directory's record for a session.
    ///
    /// If the owner in the record is this instance, the session is confirmed. If it is another instance, the session is contested. If the
    /// record is a tombstone, the session is relinquished.
    pub(crate) fn on_found(&self, session: SessionHash, record: Record) {
        match record {
            Record::Owned(ownership) if ownership.owner.incarnation == self.this_instance => {
                let must_renew = self.shard(session).get_mut(&session).is_some_and(|local| {
                    let is_later = ownership.epoch > local.epoch;
                    local.epoch = local.epoch.max(ownership.epoch);
                    local.written_at = Some(Instant::now());
                    local.contested = None;
                    let Some(since) = local.renewal_due.take() else {
                        local.unconfirmed = None;
                        return false;
                    };
                    if is_later {
                        // An earlier write took this epoch, but its response was lost, so the next write takes a higher epoch.
                        local.renewal_due = Some(since);
                    } else {
                        // The directory had lost the record, so the session has been written at its old epoch. The next epoch is higher, so
                        // that a claim on the previous record fails, but lower than the epoch of any claim, so that a later claim that the
                        // directory has lost still wins.
                        local.epoch = local.epoch.after_loss();
                    }
                    true
                });
                if must_renew {
                    self.write_again(session);
                }
            }
            Record::Owned(ownership) => {
                if let Some(local) = self.shard(session).get_mut(&session) {
                    // Set this before confirming the session, because this instance's status must always show one of the two states.
                    local.contested = Some(Contested::new(ownership, &self.contested));
                    local.unconfirmed = None;
                }
                self.contest.notify_one();
            }
            Record::Deleted(_) => self.relinquish_to(session, RelinquishedTo::Ended),
        }
    }

    pub(crate) fn has_contested(&self) -> bool {
        self.contested.load(Ordering::Acquire) > 0
    }

    /// Returns `true` if any session is contested, or has been relinquished but not closed yet.
    ///
    /// The calls of such a session may still be running.
    pub(crate) fn has_unclosed(&self) -> bool {
        self.has_contested() || self.relinquished.has_pending_closes()
    }

    /// Returns the contested sessions, each with the ownership that contests it.
    pub(crate) fn contested(&self) -> Vec<(SessionHash, Ownership)> {
        if !self.has_contested() {
            return Vec::new();
        }
        let contested = self.shards.iter().flat_map(|shard| {
            let shard = lock(shard);
            let ownerships = shard
                .iter()
                .filter_map(|(session, local)| Some((*session, local.contested.as_ref()?.by)));
            Vec::from_iter(ownerships)
        });
        contested.collect()
    }

    /// Relinquishes a session to the owner that contests it.
    ///
    /// Does nothing if that ownership no longer contests the session.
    pub(crate) fn relinquish_contested(&self, session: SessionHash, by: Ownership) {
        self.relinquish_if(session, RelinquishedTo::Owner(by.owner), |local| {
            local
                .contested
                .as_ref()
                .is_some_and(|contested| contested.by == by)
        });
    }

    /// Waits until a session becomes contested.
    ///
    /// Returns immediately if a session has become contested since the previous call returned.
    pub(crate) async fn wait_until_contested(&self) {
        self.contest.notified().await;
    }

    /// Returns `true` if no other instance contests a session or can have claimed it since `lapse`.
    ///
    /// A session that is not local does not need to be verified.
    pub(crate) fn is_verified(&self, session: SessionHash, lapse: Option<Lapse>) -> bool {
        let shard = self.shard(session);
        shard
            .get(&session)
            .is_none_or(|local| local.is_verified(lapse))
    }
}
