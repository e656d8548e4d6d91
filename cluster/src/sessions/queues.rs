//! Queues of sessions and tombstones waiting to be written to the directory.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::{
    directory::{RECORD_TTL, Registration},
    ids::{Epoch, SessionHash, Tombstone},
};

/// Maximum number of deleted sessions in each queue. Beyond that, the oldest are dropped.
///
/// The directory removes their records on its own within an hour.
pub(super) const MAX_DELETED: usize = 4 * 1024;

/// A group of writes sent together.
///
/// Every batch must be passed to [`on_written`](super::Sessions::on_written) or [`requeue`](super::Sessions::requeue), and every deletion
/// to [`on_deletion_result`](super::Sessions::on_deletion_result).
pub(crate) enum Work {
    Delete(Vec<(SessionHash, Tombstone)>),
    Register(Batch),
}

/// Sessions to be written together.
pub(crate) struct Batch {
    pub(crate) sessions: Vec<Registration>,
    /// When the batch was taken from the queues.
    pub(super) taken_at: Instant,
    /// Whether the directory may have held these sessions before.
    pub(super) is_rewrite: bool,
}

/// Sessions and tombstones waiting to be written.
#[derive(Default)]
pub(super) struct Queues {
    /// Sessions that have never been in the directory. They are written first, because their clients are waiting.
    pub(super) fresh: VecDeque<SessionHash>,
    /// Sessions to be rewritten.
    pub(super) rewrites: VecDeque<SessionHash>,
    /// Deleted sessions whose tombstones have yet to be written.
    pub(super) deleted: VecDeque<Deleted>,
    /// Deleted sessions whose tombstones have been written, and when, oldest first.
    ///
    /// At most [`MAX_DELETED`] are retained. If the directory may have lost data, they are requeued.
    tombstones: VecDeque<(Instant, SessionHash, Epoch)>,
}

pub(super) struct Deleted {
    pub(super) session: SessionHash,
    pub(super) epoch: Epoch,
    pub(super) is_in_flight: bool,
    /// Whether the directory once had the tombstone and may have lost it.
    pub(super) is_rewrite: bool,
}

// === impl Queues ===

impl Queues {
    pub(super) fn next(&mut self, is_rewrite: bool) -> Option<SessionHash> {
        let queue = if is_rewrite {
            &mut self.rewrites
        } else {
            &mut self.fresh
        };
        queue.pop_front()
    }

    /// Records that a session's tombstone has been written, which completes its queued deletions.
    ///
    /// Does nothing if no deletion is queued.
    pub(super) fn confirm_tombstone(&mut self, session: SessionHash) {
        let matches_session = |deleted: &Deleted| deleted.session == session;
        let deletions = self
            .deleted
            .iter()
            .filter(|deleted| matches_session(deleted));
        let Some(epoch) = deletions.map(|deleted| deleted.epoch).max() else {
            return;
        };
        self.deleted.retain(|deleted| !matches_session(deleted));
        let now = Instant::now();
        self.tombstones.push_back((now, session, epoch));
        while self.tombstones.len() > MAX_DELETED
            || (self.tombstones.front())
                .is_some_and(|(written_at, ..)| now - *written_at >= RECORD_TTL)
        {
            self.tombstones.pop_front();
        }
    }

    /// Requeues all tombstones, because the directory may have lost them.
    ///
    /// The queue may exceed [`MAX_DELETED`] as a result.
    pub(super) fn requeue_tombstones(&mut self) {
        let lost = self
            .tombstones
            .drain(..)
            .map(|(_, session, epoch)| Deleted {
                session,
                epoch,
                is_in_flight: false,
                is_rewrite: true,
            });
        self.deleted.extend(lost);
    }

    /// Returns `true` if a tombstone that may have been lost has yet to be rewritten.
    pub(super) fn has_lost_tombstones(&self) -> bool {
        self.deleted.iter().any(|deleted| deleted.is_rewrite)
    }
}
