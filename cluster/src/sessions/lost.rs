//! Sessions that do not live here any more, to be closed.

use std::{
    fmt::{self, Debug, Formatter},
    sync::Arc,
};

use crate::ids::{Owner, SessionHash};

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
    /// It has not begun: no client was given it.
    Nobody,
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
