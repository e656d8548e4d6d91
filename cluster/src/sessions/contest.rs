//! Contested sessions: their records in the directory have a higher epoch and another owner.
//!
//! A contested session serves nothing new, and its calls continue, until the heartbeat task decides. The session is relinquished if that
//! owner has its lease, and claimed back if that owner provably has none.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::{contested::Contested, lapse::Lapse, relinquished::RelinquishedTo, state::Sessions};
use crate::{
    ids::{Epoch, Ownership, Record, SessionHash},
    lock::lock,
};

// === impl Sessions ===

impl Sessions {
    /// Called when this instance has claimed a session. A local session is no longer contested after that.
    pub(crate) fn on_claimed(&self, session: SessionHash, epoch: Epoch) {
        if let Some(local) = self.shard(session).get_mut(&session) {
            local.on_written(Instant::now(), Some(epoch));
        }
    }

    /// Called with a session's record in the directory.
    ///
    /// A record of this instance confirms the session. Another owner's record contests the session. A tombstone relinquishes it.
    pub(crate) fn on_found(&self, session: SessionHash, record: Record) {
        match record {
            Record::Owned(ownership) if ownership.owner.incarnation == self.me => {
                let must_renew = self.shard(session).get_mut(&session).is_some_and(|local| {
                    let is_later = ownership.epoch > local.epoch;
                    local.epoch = local.epoch.max(ownership.epoch);
                    local.written = Some(Instant::now());
                    local.contested = None;
                    let Some(since) = local.renewal_due.take() else {
                        local.unconfirmed = None;
                        return false;
                    };
                    if is_later {
                        // An earlier write took this epoch, and its response was lost. The next write takes a higher one.
                        local.renewal_due = Some(since);
                    } else {
                        // The directory had lost the record, so the session was written at its old epoch. The next epoch is higher, so a
                        // claim on the previous record fails. It is lower than that of any claim, so a later claim that the directory has
                        // lost wins.
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
                    // Set before the session is confirmed, because this instance's status must show one of the two.
                    local.contested = Some(Contested::new(ownership, &self.contested));
                    local.unconfirmed = None;
                }
                self.contest.notify_one();
            }
            Record::Deleted(_) => self.relinquish_to(session, RelinquishedTo::Ended),
        }
    }

    /// Returns `true` if any session is contested.
    pub(crate) fn has_contested(&self) -> bool {
        self.contested.load(Ordering::Acquire) > 0
    }

    /// Returns `true` if any session is contested, or relinquished and not closed yet. Its calls may still be running.
    pub(crate) fn has_unclosed(&self) -> bool {
        self.has_contested() || self.relinquished.has_pending_closes()
    }

    /// Returns the contested sessions, each with its ownership in the directory.
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

    /// Relinquishes a session to the owner that contests it. Does nothing unless this ownership still contests the session.
    pub(crate) fn relinquish_contested(&self, session: SessionHash, by: Ownership) {
        self.relinquish_if(session, RelinquishedTo::Owner(by.owner), |local| {
            local
                .contested
                .as_ref()
                .is_some_and(|contested| contested.by == by)
        });
    }

    /// Waits until a session becomes contested. Returns at once if one has become contested since this last returned.
    pub(crate) async fn until_contested(&self) {
        self.contest.notified().await;
    }

    /// Returns `true` if a session is uncontested, and not claimed elsewhere since `lapse`.
    ///
    /// A session that is not local needs no verification.
    pub(crate) fn is_verified(&self, session: SessionHash, lapse: Option<Lapse>) -> bool {
        let shard = self.shard(session);
        shard
            .get(&session)
            .is_none_or(|local| local.is_verified(lapse))
    }
}
