//! A registry's session managers.
//!
//! Sessions are looked up by id alone, so a request finds its session whichever path or service clone it uses.

use std::sync::{
    OnceLock, PoisonError, RwLock, Weak,
    atomic::{AtomicBool, Ordering},
};

use crate::call::Scope;

/// Number of session managers that can be looked up without taking a lock. A server has one per MCP service.
const INLINE_MANAGERS: usize = 4;

/// A session manager that can look up its sessions.
pub(crate) trait Manager: Send + Sync {
    /// Returns the scope within which its session ids are unique.
    fn scope(&self) -> Scope;

    /// Marks a session as in use until the returned guard is dropped. Returns `None` if the manager does not have the session.
    fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>>;

    /// Returns `true` if the manager has a session with this id, or tracks calls in one.
    fn has(&self, session: &str) -> bool;
}

/// The session managers that have bound a call or opened a session behind the layer. Lookups try them in order.
#[derive(Default)]
pub(super) struct Managers {
    inline: [OnceLock<Weak<dyn Manager>>; INLINE_MANAGERS],
    overflow: RwLock<Vec<Weak<dyn Manager>>>,
    has_overflow: AtomicBool,
}

// === impl Managers ===

impl Managers {
    /// Adds a manager. If the manager has to be added to the overflow list, dropped managers are purged from that list first.
    pub(super) fn add(&self, manager: Weak<dyn Manager>) {
        let mut rest = Some(manager);
        // The first free slot takes the manager.
        for slot in &self.inline {
            rest = rest.and_then(|manager| slot.set(manager).err());
        }
        if let Some(manager) = rest {
            let mut overflow = self
                .overflow
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            overflow.retain(|manager| manager.strong_count() > 0);
            overflow.push(manager);
            self.has_overflow.store(true, Ordering::Release);
        }
    }

    /// Returns the scope of the first manager that has the session.
    pub(super) fn scope_of(&self, session: &str) -> Option<Scope> {
        self.find_map(|manager| manager.has(session).then(|| manager.scope()))
    }

    /// Marks the session as in use in the first manager that has it.
    pub(super) fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        self.find_map(|manager| manager.begin_use(session))
    }

    /// Returns the first `Some` returned by `find`.
    fn find_map<R>(&self, find: impl Fn(&dyn Manager) -> Option<R>) -> Option<R> {
        let find_in = |manager: &Weak<dyn Manager>| find(&*manager.upgrade()?);
        let inline = self.inline.iter().filter_map(OnceLock::get);
        let result = inline.into_iter().find_map(find_in);
        result.or_else(|| self.overflow().iter().find_map(find_in))
    }

    /// Returns a copy of the overflow list, so that no manager is dropped while the lock is held.
    fn overflow(&self) -> Vec<Weak<dyn Manager>> {
        if !self.has_overflow.load(Ordering::Acquire) {
            return Vec::new();
        }
        let overflow = self.overflow.read().unwrap_or_else(PoisonError::into_inner);
        overflow.clone()
    }
}
