//! A session that lives here, and how far the directory knows it.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    contested::{Contested, Unconfirmed},
    lapse::Lapse,
    relinquished::{Relinquished, RelinquishedTo},
    session_index::{IndexGuard, SessionIndex},
};
use crate::ids::{Epoch, SessionHash};

pub(super) struct LocalSession {
    pub(super) id: Arc<str>,
    _index_guard: IndexGuard,
    /// The epoch at which this instance owns it.
    pub(super) epoch: Epoch,
    /// What the directory has of it, if that has a higher epoch.
    pub(super) contested: Option<Contested>,
    /// It is to be written again before the directory counts as consistent.
    pub(super) unconfirmed: Option<Unconfirmed>,
    /// The `initialize` parameters, as JSON. Without them there is nothing to be written yet.
    pub(super) params: Option<Arc<[u8]>>,
    /// Since when it is loaded. `None` once it is open.
    pub(super) loaded: Option<Instant>,
    pub(super) written: Option<Instant>,
    /// When an epoch was taken for it last: no claim on what others read before is won any more.
    pub(super) renewed: Instant,
    /// Since when it is to take another one.
    pub(super) renews: Option<Instant>,
    pub(super) is_queued: bool,
    /// The directory was asked to know it.
    pub(super) is_sent: bool,
}

// === impl LocalSession ===

impl LocalSession {
    pub(super) fn new(id: &str, session_index: &Arc<SessionIndex>) -> Self {
        let id: Arc<str> = id.into();
        Self {
            _index_guard: session_index.insert(&id),
            id,
            epoch: Epoch::now(),
            contested: None,
            unconfirmed: None,
            params: None,
            loaded: None,
            written: None,
            renewed: Instant::now(),
            renews: None,
            is_queued: false,
            is_sent: false,
        }
    }

    /// One that is about to be restored.
    pub(super) fn loaded(id: &str, epoch: Epoch, session_index: &Arc<SessionIndex>) -> Self {
        Self {
            epoch,
            loaded: Some(Instant::now()),
            ..Self::new(id, session_index)
        }
    }

    /// It does not live here any more.
    pub(super) fn into_relinquished(
        self,
        session: SessionHash,
        to: RelinquishedTo,
    ) -> Relinquished {
        let id = self.id;
        Relinquished { id, session, to }
    }

    /// Whether no other instance has it since that lapse. One without parameters is in no directory, so none can have claimed it.
    pub(super) fn is_verified(&self, lapse: Option<Lapse>) -> bool {
        let is_verified = |lapse: Lapse| {
            let is_written = self.written.is_some_and(|at| at >= lapse.since) && !lapse.by_stall;
            self.params.is_none()
                || self.renews.is_none() && (is_written || self.renewed >= lapse.since)
        };
        self.contested.is_none() && lapse.is_none_or(is_verified)
    }

    /// The directory has it since then, at an epoch that was taken with that, if any was.
    pub(super) fn on_written(&mut self, at: Instant, renewed: Option<Epoch>) {
        self.written = Some(at);
        self.contested = None;
        let _confirmed = self.unconfirmed.take_if(|it| it.since <= at);
        if let Some(epoch) = renewed {
            self.epoch = self.epoch.max(epoch);
            self.renewed = at;
            self.renews = self.renews.filter(|since| *since > at);
        }
    }

    /// Whether the directory is to know it, and does not.
    pub(super) fn is_unknown(&self) -> bool {
        self.params.is_some() && self.written.is_none()
    }
}
