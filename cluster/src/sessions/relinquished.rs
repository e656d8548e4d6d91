//! Sessions that do not live here any more, to be closed.

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

/// Sends the sessions that were relinquished, and knows which of them are not closed yet.
pub(crate) struct RelinquishedSessions {
    sender: mpsc::UnboundedSender<Relinquished>,
    /// How often each was sent that is not closed yet.
    closing: Mutex<HashMap<SessionHash, usize>>,
    /// Something was closed.
    closed: Notify,
}

/// A session that does not live here any more, although it is open.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Relinquished {
    /// The session's id, to close it by.
    pub(crate) id: Arc<str>,
    pub(crate) session: SessionHash,
    pub(crate) to: RelinquishedTo,
}

/// Whose a session is that was relinquished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RelinquishedTo {
    Owner(Owner),
    /// The next instance that asks for it claims it.
    AnyClaimer,
    /// It was restored in vain: the next request restores it again.
    RestoreRetry,
    /// It has not begun: no client was given it.
    NoClient,
    /// Its client ended it, through another instance.
    Ended,
}

// === impl RelinquishedSessions ===

impl RelinquishedSessions {
    /// None yet, and where they are received.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<Relinquished>) {
        // It holds at most what lived here.
        let (sender, receiver) = mpsc::unbounded_channel();
        let sessions = Self {
            sender,
            closing: Mutex::default(),
            closed: Notify::new(),
        };
        (sessions, receiver)
    }

    pub(crate) fn notify(&self, session: Relinquished) {
        *self.closing().entry(session.session).or_default() += 1;
        // If there is no receiver, sessions are not closed any more.
        let _sent = self.sender.send(session);
    }

    /// A session that was sent is closed.
    pub(crate) fn on_closed(&self, session: &Relinquished) {
        if let Entry::Occupied(mut count) = self.closing().entry(session.session) {
            match count.get().checked_sub(1) {
                Some(left @ 1..) => *count.get_mut() = left,
                _ => drop(count.remove()),
            }
        }
        self.closed.notify_waiters();
    }

    /// Returns when nothing is left of a session that was relinquished. What comes back before would be closed with that.
    pub(crate) async fn until_closed(&self, session: SessionHash) {
        let is_closed = || !self.closing().contains_key(&session);
        wait_until(&self.closed, is_closed).await;
    }

    fn closing(&self) -> MutexGuard<'_, HashMap<SessionHash, usize>> {
        lock(&self.closing)
    }
}

// === impl Relinquished ===

impl Debug for Relinquished {
    /// Without the id, which is a secret.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let fields = (self.session, self.to);
        f.debug_tuple("Relinquished")
            .field(&fields.0)
            .field(&fields.1)
            .finish()
    }
}
