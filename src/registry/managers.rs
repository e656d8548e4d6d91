//! The session managers whose calls a registry has: who asks by a session id finds the session, whatever path or
//! clone of a service he comes through.

use std::sync::{PoisonError, RwLock, Weak};

use crate::call::Scope;

/// A session manager, as far as it knows which sessions are its own.
pub(crate) trait Manager: Send + Sync {
    /// Where its session ids are unique.
    fn scope(&self) -> Scope;

    /// Whether it has a session with this id, or calls of one.
    fn has(&self, session: &str) -> bool;
}

/// Those that bound a call, or opened a session, behind the layer. Few: the server's own code makes them.
#[derive(Default)]
pub(super) struct Managers(RwLock<Vec<Weak<dyn Manager>>>);

// === impl Managers ===

impl Managers {
    #[cfg(feature = "rmcp")]
    pub(super) fn add(&self, manager: Weak<dyn Manager>) {
        let mut managers = self.0.write().unwrap_or_else(PoisonError::into_inner);
        managers.retain(|manager| manager.strong_count() > 0);
        managers.push(manager);
    }

    /// The scope of a session that one of them has.
    pub(super) fn scope_of(&self, session: &str) -> Option<Scope> {
        let managers = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut managers = managers.iter().filter_map(Weak::upgrade);
        let manager = managers.find(|manager| manager.has(session))?;
        Some(manager.scope())
    }
}
