//! Relinquished sessions that have yet to be closed.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::{Notify, mpsc};

use crate::{
    ids::{Owner, SessionHash},
    lock::lock,
    wait_until::wait_until,
};

/// Sends relinquished sessions to the task that closes them, and tracks pending closes.
pub(crate) struct RelinquishedSessions {
    sender: mpsc::UnboundedSender<Relinquished>,
    /// Number of pending closes per session.
    closing: Mutex<HashMap<SessionHash, usize>>,
    /// Notified when a session has been closed.
    closed: Notify,
}

/// A relinquished session that is still open here.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Relinquished {
    /// The session's id, which is needed to close it.
    pub(crate) id: Arc<str>,
    pub(crate) session: SessionHash,
    pub(crate) to: RelinquishedTo,
}

/// A relinquished session's new owner, or why it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RelinquishedTo {
    Owner(Owner),
    /// The next instance that asks for the session will claim it.
    AnyClaimer,
    /// The restore failed, and the next request will restore the session again.
    RestoreRetry,
    /// The session could not be given to its client, so it never started.
    NoClient,
    /// The session has ended, for example through another instance or at another service.
    Ended,
}

// === impl RelinquishedSessions ===

impl RelinquishedSessions {
    /// Returns an empty set, along with the receiver for relinquished sessions.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<Relinquished>) {
        // In effect, this is bounded by the number of local sessions.
        let (sender, receiver) = mpsc::unbounded_channel();
        let sessions = Self {
            sender,
            closing: Mutex::default(),
            closed: Notify::new(),
        };
        (sessions, receiver)
    }

    /// Sends a session to the task that closes it.
    pub(crate) fn notify(&self, session: Relinquished) {
        *self.closing().entry(session.session).or_default() += 1;
        // Fails only if the task that closes sessions has ended.
        let _ = self.sender.send(session);
    }

    /// Called when a relinquished session has been closed.
    pub(crate) fn on_closed(&self, session: &Relinquished) {
        if let Entry::Occupied(mut count) = self.closing().entry(session.session) {
            match count.get().checked_sub(1) {
                Some(remaining @ 1..) => *count.get_mut() = remaining,
                _ => drop(count.remove()),
            }
        }
        self.closed.notify_waiters();
    }

    /// Returns `true` if any session has yet to be closed.
    pub(super) fn has_pending_closes(&self) -> bool {
        !self.closing().is_empty()
    }

    /// Waits until every pending close of a session has completed.
    ///
    /// A session restored before then would be closed too.
    pub(crate) async fn wait_until_closed(&self, session: SessionHash) {
        let is_closed = || !self.closing().contains_key(&session);
        wait_until(&self.closed, is_closed).await;
    }

    fn closing(&self) -> MutexGuard<'_, HashMap<SessionHash, usize>> {
        lock(&self.closing)
    }
}

// === impl Relinquished ===

impl Debug for Relinquished {
    /// Omits the id, which is a secret.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let fields = (self.session, self.to);
        f.debug_tuple("Relinquished")
            .field(&fields.0)
            .field(&fields.1)
            .finish()
    }
}
