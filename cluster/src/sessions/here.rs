//! A session that lives here, and how far the directory knows it.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    contested::Contested,
    lost::{Lost, To},
    roll::{Listed, Roll},
};
use crate::ids::{Epoch, SessionHash};

pub(super) struct Here {
    pub(super) id: Arc<str>,
    _listed: Listed,
    /// The epoch at which this instance owns it.
    pub(super) epoch: Epoch,
    /// What the directory has of it, if that has a higher epoch.
    pub(super) contested: Option<Contested>,
    /// The `initialize` parameters, as JSON. Without them there is nothing to be written yet.
    pub(super) params: Option<Arc<[u8]>>,
    /// Since when it is loaded. `None` once it is open.
    pub(super) loaded: Option<Instant>,
    pub(super) written: Option<Instant>,
    pub(super) is_queued: bool,
    /// The directory was asked to know it.
    pub(super) is_sent: bool,
}

// === impl Here ===

impl Here {
    pub(super) fn new(id: &str, roll: &Arc<Roll>) -> Self {
        let id: Arc<str> = id.into();
        Self {
            _listed: roll.list(&id),
            id,
            epoch: Epoch::now(),
            contested: None,
            params: None,
            loaded: None,
            written: None,
            is_queued: false,
            is_sent: false,
        }
    }

    /// One that is about to be restored.
    pub(super) fn loaded(id: &str, epoch: Epoch, roll: &Arc<Roll>) -> Self {
        Self {
            epoch,
            loaded: Some(Instant::now()),
            ..Self::new(id, roll)
        }
    }

    /// It does not live here any more.
    pub(super) fn lost(self, session: SessionHash, to: To) -> Lost {
        let id = self.id;
        Lost { id, session, to }
    }

    /// Whether it was written since then. One without parameters is in no directory, so no other instance can have claimed it.
    pub(super) fn is_verified(&self, since: Option<Instant>) -> bool {
        let is_written =
            |since| self.params.is_none() || self.written.is_some_and(|at| at >= since);
        self.contested.is_none() && since.is_none_or(is_written)
    }

    /// Whether the directory is to know it, and does not.
    pub(super) fn is_unknown(&self) -> bool {
        self.params.is_some() && self.written.is_none()
    }
}
