//! Sessions that do not live here any more, to be closed.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, mpsc};

use crate::ids::{Owner, SessionHash};

/// Tells which sessions were lost, and knows which of them are not closed yet.
pub(crate) struct Losses {
    tell: mpsc::UnboundedSender<Lost>,
    /// How often each was told that is not closed yet.
    closing: Mutex<HashMap<SessionHash, usize>>,
    /// Something was closed.
    closed: Notify,
}

/// A session that does not live here any more, although it is open.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    /// The session's id, to close it by.
    pub(crate) id: Arc<str>,
    pub(crate) session: SessionHash,
    pub(crate) to: To,
}

/// Whose a session is that was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    Owner(Owner),
    /// It was given up: the next who asks for it claims it.
    WhoeverAsks,
    /// It was restored in vain: the next request restores it again.
    NextRequest,
    /// It has not begun: no client was given it.
    Nobody,
    /// Its client ended it, through another instance.
    Ended,
}

// === impl Losses ===

impl Losses {
    /// None yet, and where it is told which there are.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<Lost>) {
        // It holds at most what lived here.
        let (tell, told) = mpsc::unbounded_channel();
        let losses = Self {
            tell,
            closing: Mutex::default(),
            closed: Notify::new(),
        };
        (losses, told)
    }

    pub(crate) fn tell(&self, lost: Lost) {
        *self.closing().entry(lost.session).or_default() += 1;
        // If nobody listens, nobody closes sessions any more.
        let _told = self.tell.send(lost);
    }

    /// What was told is closed.
    pub(crate) fn was_closed(&self, lost: &Lost) {
        if let Entry::Occupied(mut times) = self.closing().entry(lost.session) {
            match times.get().checked_sub(1) {
                Some(left @ 1..) => *times.get_mut() = left,
                _ => drop(times.remove()),
            }
        }
        self.closed.notify_waiters();
    }

    /// Returns when nothing is left of a session that was lost. What comes back before would be closed with that.
    pub(crate) async fn until_closed(&self, session: SessionHash) {
        loop {
            let mut closed = pin!(self.closed.notified());
            // Listens before it looks.
            closed.as_mut().enable();
            if !self.closing().contains_key(&session) {
                return;
            }
            closed.await;
        }
    }

    fn closing(&self) -> MutexGuard<'_, HashMap<SessionHash, usize>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Lost ===

impl Debug for Lost {
    /// Without the id, which is a secret.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let fields = (self.session, self.to);
        f.debug_tuple("Lost")
            .field(&fields.0)
            .field(&fields.1)
            .finish()
    }
}
