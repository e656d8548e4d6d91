//! The queues of what is to be written to the directory.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::{
    directory::{RECORD_TTL, Registration},
    ids::{Epoch, SessionHash, Tombstone},
};

/// How many deleted sessions are remembered while the directory is away: 4,096. Beyond that the oldest are left to the
/// directory, which forgets them in an hour.
pub(super) const MAX_DELETED: usize = 4 * 1024;

/// What is to be written at once. A batch must come back, by [`on_written`](super::Sessions::on_written) or [`requeue`](super::Sessions::requeue), and each deletion
/// by [`on_deletion_result`](super::Sessions::on_deletion_result).
pub(crate) enum Work {
    Delete(Vec<(SessionHash, Tombstone)>),
    Register(Batch),
}

/// Sessions to be written at once.
pub(crate) struct Batch {
    pub(crate) sessions: Vec<Registration>,
    /// When they were taken to be written.
    pub(super) begun: Instant,
    /// The directory may have known them.
    pub(super) is_again: bool,
}

/// What is to be written.
#[derive(Default)]
pub(super) struct Queues {
    /// Sessions that the directory has never known. They come first: a client waits.
    pub(super) fresh: VecDeque<SessionHash>,
    /// All others.
    pub(super) again: VecDeque<SessionHash>,
    /// Deleted sessions of which the directory has no tombstone yet.
    pub(super) deleted: VecDeque<Deleted>,
    /// Deleted sessions of which the directory has a tombstone, the oldest first, and since when. A directory that returns with older
    /// data is given them again. Not more than [`MAX_DELETED`].
    tombstones: VecDeque<(Instant, SessionHash, Epoch)>,
}

pub(super) struct Deleted {
    pub(super) session: SessionHash,
    pub(super) epoch: Epoch,
    pub(super) is_in_flight: bool,
    /// The directory had a tombstone, and may have lost it.
    pub(super) is_again: bool,
}

// === impl Queues ===

impl Queues {
    pub(super) fn next(&mut self, is_again: bool) -> Option<SessionHash> {
        let queue = if is_again {
            &mut self.again
        } else {
            &mut self.fresh
        };
        queue.pop_front()
    }

    /// The directory has a tombstone of a session, however often that was deleted.
    pub(super) fn confirm_tombstone(&mut self, session: SessionHash) {
        let is_its = |deleted: &Deleted| deleted.session == session;
        let its = self.deleted.iter().filter(|deleted| is_its(deleted));
        let Some(epoch) = its.map(|deleted| deleted.epoch).max() else {
            return;
        };
        self.deleted.retain(|deleted| !is_its(deleted));
        let now = Instant::now();
        self.tombstones.push_back((now, session, epoch));
        while self.tombstones.len() > MAX_DELETED
            || (self.tombstones.front()).is_some_and(|(since, ..)| now - *since >= RECORD_TTL)
        {
            self.tombstones.pop_front();
        }
    }

    /// The directory may have lost all tombstones.
    pub(super) fn requeue_tombstones(&mut self) {
        let lost = self
            .tombstones
            .drain(..)
            .map(|(_, session, epoch)| Deleted {
                session,
                epoch,
                is_in_flight: false,
                is_again: true,
            });
        self.deleted.extend(lost);
    }

    /// Whether a tombstone that the directory has had, and may have lost, is not written again yet.
    pub(super) fn has_lost_tombstones(&self) -> bool {
        self.deleted.iter().any(|deleted| deleted.is_again)
    }
}
