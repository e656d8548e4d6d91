//! How a call is named: its session, and its JSON-RPC id there.

use std::sync::Arc;

use crate::call::RequestId;

/// A session as the client names it, and who gave out its id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SessionKey {
    pub(crate) scope: Scope,
    pub(crate) id: Arc<str>,
}

/// Who gives out session ids: the same id of another scope is another session.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Scope {
    /// A session manager of ours, by its instance.
    #[cfg(feature = "rmcp")]
    Manager(u64),
    /// Whatever serves this request path.
    Path(Box<str>),
}

/// A session call by its JSON-RPC id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) session: SessionKey,
    pub(crate) request: RequestId,
}

// === impl SessionKey ===

impl SessionKey {
    /// How long the texts in it are, which a client may have chosen.
    pub(crate) fn text_len(&self) -> usize {
        self.scope.path().map_or(0, str::len) + self.id.len()
    }
}

// === impl Scope ===

impl Scope {
    /// The path, if no session manager of ours is known there.
    pub(crate) fn path(&self) -> Option<&str> {
        match self {
            Self::Path(path) => Some(path),
            #[cfg(feature = "rmcp")]
            Self::Manager(_) => None,
        }
    }
}
