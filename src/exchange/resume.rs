//! A GET with `Last-Event-ID`, and the calls whose clocks it stopped.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use crate::call::{CallId, SessionKey};

pub(super) struct Resume<T> {
    pub(super) session: SessionKey,
    pub(super) event_id: Box<[u8]>,
    /// The calls whose clock it stopped: several, if nobody can say which of them it names.
    holds: Mutex<Holds<T>>,
}

type Holds<T> = Vec<(CallId, Arc<T>)>;

// === impl Resume ===

impl<T> Resume<T> {
    pub(super) fn new(session: SessionKey, event_id: Box<[u8]>, holds: Holds<T>) -> Self {
        Self {
            session,
            event_id,
            holds: Mutex::new(holds),
        }
    }

    /// Whether a session manager says what becomes of it: rmcp answers 200 to a resume that it refuses.
    pub(super) fn is_managed(&self) -> bool {
        self.session.scope.path().is_none()
    }

    pub(super) fn take_holds(&self) -> Holds<T> {
        mem::take(&mut *self.holds.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
