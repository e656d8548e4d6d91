//! The session managers whose calls a registry has. A session is looked for among them by its id, so it is found whatever path or
//! clone of a service a request comes through.

use std::sync::{
    OnceLock, PoisonError, RwLock, Weak,
    atomic::{AtomicBool, Ordering},
};

use crate::call::Scope;

/// How many are found without a lock: 4. A server has one for each MCP service.
const INLINE_MANAGERS: usize = 4;

/// A session manager, as far as it knows which sessions are its own.
pub(crate) trait Manager: Send + Sync {
    /// Where its session ids are unique.
    fn scope(&self) -> Scope;

    /// Uses a session until what is returned is dropped. `None` if it has none with this id.
    fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>>;

    /// Whether it has a session with this id, or calls of one.
    fn has(&self, session: &str) -> bool;
}

/// Those that bound a call, or opened a session, behind the layer. Every request looks at all.
#[derive(Default)]
pub(super) struct Managers {
    inline: [OnceLock<Weak<dyn Manager>>; INLINE_MANAGERS],
    overflow: RwLock<Vec<Weak<dyn Manager>>>,
    has_overflow: AtomicBool,
}

// === impl Managers ===

impl Managers {
    pub(super) fn add(&self, manager: Weak<dyn Manager>) {
        let mut left = Some(manager);
        for place in &self.inline {
            left = left.and_then(|manager| place.set(manager).err());
        }
        if let Some(manager) = left {
            let mut others = self
                .overflow
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            others.retain(|manager| manager.strong_count() > 0);
            others.push(manager);
            self.has_overflow.store(true, Ordering::Release);
        }
    }

    /// The scope of a session that one of them has.
    pub(super) fn scope_of(&self, session: &str) -> Option<Scope> {
        self.find_map(|manager| manager.has(session).then(|| manager.scope()))
    }

    /// Uses a session that one of them has.
    pub(super) fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        self.find_map(|manager| manager.begin_use(session))
    }

    fn find_map<R>(&self, find: impl Fn(&dyn Manager) -> Option<R>) -> Option<R> {
        let in_one = |manager: &Weak<dyn Manager>| find(&*manager.upgrade()?);
        let first = self.inline.iter().filter_map(OnceLock::get);
        let found = first.into_iter().find_map(in_one);
        found.or_else(|| self.overflow().iter().find_map(in_one))
    }

    /// A copy: one that goes meanwhile is dropped without the lock.
    fn overflow(&self) -> Vec<Weak<dyn Manager>> {
        if !self.has_overflow.load(Ordering::Acquire) {
            return Vec::new();
        }
        let others = self.overflow.read().unwrap_or_else(PoisonError::into_inner);
        others.clone()
    }
}
