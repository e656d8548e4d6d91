//! A local session's state, including what is known about its record in the directory.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    contested::{Contested, Unconfirmed},
    lapse::Lapse,
    relinquished::{Relinquished, RelinquishedTo},
    session_index::{IndexGuard, SessionIndex},
};
use crate::ids::{Epoch, SessionHash};

/// A session on this instance, either open or loaded to be restored.
pub(super) struct LocalSession {
    pub(super) id: Arc<str>,
    _index_guard: IndexGuard,
    /// The epoch at which this instance owns the session.
    pub(super) epoch: Epoch,
    /// Another owner's record in the directory, if there is one with a higher epoch.
    pub(super) contested: Option<Contested>,
    /// Set while the session must be rewritten before the directory is considered consistent.
    pub(super) unconfirmed: Option<Unconfirmed>,
    /// The `initialize` parameters, as JSON. The session is not written until they are known.
    pub(super) params: Option<Arc<[u8]>>,
    pub(super) phase: Phase,
    /// When the session was last known to be in the directory, or `None` if not yet written.
    pub(super) written_at: Option<Instant>,
    /// When the session last adopted an epoch. Claims on earlier records can no longer succeed.
    pub(super) renewed_at: Instant,
    /// When a new epoch became due, or `None` if none is due.
    pub(super) renewal_due: Option<Instant>,
    pub(super) is_queued: bool,
    /// Whether the session has ever been sent to the directory.
    pub(super) was_sent: bool,
}

/// How far a session's restore has progressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its parameters were loaded at this time.
    Loaded(Instant),
    /// It has been opened, but its handler has not accepted the replayed `initialize` yet, so it has no calls.
    Restoring,
    /// It has been restored, or was opened by its client.
    Open,
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
            phase: Phase::Open,
            written_at: None,
            renewed_at: Instant::now(),
            renewal_due: None,
            is_queued: false,
            was_sent: false,
        }
    }

    /// Creates a session about to be restored.
    pub(super) fn loaded(id: &str, epoch: Epoch, session_index: &Arc<SessionIndex>) -> Self {
        Self {
            epoch,
            phase: Phase::Loaded(Instant::now()),
            ..Self::new(id, session_index)
        }
    }

    pub(super) fn into_relinquished(
        self,
        session: SessionHash,
        to: RelinquishedTo,
    ) -> Relinquished {
        let id = self.id;
        Relinquished { id, session, to }
    }

    /// Returns `true` if no other instance can have claimed the session since `lapse`.
    ///
    /// A session without parameters is not in the directory, so it cannot have been claimed.
    pub(super) fn is_verified(&self, lapse: Option<Lapse>) -> bool {
        let is_verified = |lapse: Lapse| {
            let is_written = self
                .written_at
                .is_some_and(|written_at| written_at >= lapse.since)
                && !lapse.by_stall;
            self.params.is_none()
                || self.renewal_due.is_none() && (is_written || self.renewed_at >= lapse.since)
        };
        self.contested.is_none() && lapse.is_none_or(is_verified)
    }

    /// Records that the directory had the session at this time, and adopts the new epoch, if any.
    pub(super) fn on_written(&mut self, written_at: Instant, renewed: Option<Epoch>) {
        self.written_at = Some(written_at);
        self.contested = None;
        // Only a write that started after a possible loss confirms the session.
        let _confirmed = self
            .unconfirmed
            .take_if(|unconfirmed| unconfirmed.since <= written_at);
        if let Some(epoch) = renewed {
            self.epoch = self.epoch.max(epoch);
            self.renewed_at = written_at;
            self.renewal_due = self.renewal_due.filter(|since| *since > written_at);
        }
    }

    /// Returns `true` if the session has yet to be written.
    pub(super) fn is_unwritten(&self) -> bool {
        self.params.is_some() && self.written_at.is_none()
    }
}
