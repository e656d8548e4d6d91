//! The queues of what is to be written to the directory.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::{
    directory::Registration,
    ids::{Epoch, SessionHash, Tombstone},
};

/// How many deleted sessions are remembered while the directory is away: 4,096. Beyond that the oldest are left to the
/// directory, which forgets them in an hour.
pub(super) const MAX_DELETED: usize = 4 * 1024;

/// What is to be written at once. A batch must come back, by [`wrote`](super::Sessions::wrote) or [`put_back`](super::Sessions::put_back), and each deletion
/// by [`deleted_there`](super::Sessions::deleted_there).
pub(crate) enum Work {
    Delete(Vec<(SessionHash, Tombstone)>),
    Enter(Batch),
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
    /// How many batches of those are on their way.
    pub(super) again_under_way: usize,
    /// Deleted sessions of which the directory has no tombstone yet.
    pub(super) deleted: VecDeque<Deleted>,
}

pub(super) struct Deleted {
    pub(super) session: SessionHash,
    pub(super) epoch: Epoch,
    pub(super) is_under_way: bool,
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
}
