//! Sessions that are to be closed.

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
    /// Whose it is now. `None` if it is nobody's: no client was given it.
    pub(crate) owner: Option<Owner>,
}

// === impl Lost ===

impl Debug for Lost {
    /// Without the id, which is a secret.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let fields = (self.session, self.owner);
        f.debug_tuple("Lost")
            .field(&fields.0)
            .field(&fields.1)
            .finish()
    }
}
