//! The session managers whose calls a registry has. A session is looked up among them by its id, so it is found whichever path or
//! clone of a service a request takes.

use std::sync::{
    OnceLock, PoisonError, RwLock, Weak,
    atomic::{AtomicBool, Ordering},
};

use crate::call::Scope;

/// Number of session managers that are found without a lock: 4. A server has one for each MCP service.
const INLINE_MANAGERS: usize = 4;

/// A session manager that can look up its sessions.
pub(crate) trait Manager: Send + Sync {
    /// Where its session ids are unique.
    fn scope(&self) -> Scope;

    /// Uses a session until the returned guard is dropped. `None` if there is no session with this id.
    fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>>;

    /// Whether it has a session with this id, or calls of one.
    fn has(&self, session: &str) -> bool;
}

/// The session managers that bound a call, or opened a session, behind the layer. Every request searches all of them.
#[derive(Default)]
pub(super) struct Managers {
    inline: [OnceLock<Weak<dyn Manager>>; INLINE_MANAGERS],
    overflow: RwLock<Vec<Weak<dyn Manager>>>,
    has_overflow: AtomicBool,
}

// === impl Managers ===

impl Managers {
    pub(super) fn add(&self, manager: Weak<dyn Manager>) {
        let mut rest = Some(manager);
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

    /// The scope of a session that one of them has.
    pub(super) fn scope_of(&self, session: &str) -> Option<Scope> {
        self.find_map(|manager| manager.has(session).then(|| manager.scope()))
    }

    /// Uses a session of one of them.
    pub(super) fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        self.find_map(|manager| manager.begin_use(session))
    }

    fn find_map<R>(&self, find: impl Fn(&dyn Manager) -> Option<R>) -> Option<R> {
        let in_one = |manager: &Weak<dyn Manager>| find(&*manager.upgrade()?);
        let inline = self.inline.iter().filter_map(OnceLock::get);
        let found = inline.into_iter().find_map(in_one);
        found.or_else(|| self.overflow().iter().find_map(in_one))
    }

    /// Returns a copy, so that no manager is dropped under the lock.
    fn overflow(&self) -> Vec<Weak<dyn Manager>> {
        if !self.has_overflow.load(Ordering::Acquire) {
            return Vec::new();
        }
        let overflow = self.overflow.read().unwrap_or_else(PoisonError::into_inner);
        overflow.clone()
    }
}
