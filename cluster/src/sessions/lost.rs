//! Sessions that do not live here any more, to be closed.

use std::{
    fmt::{self, Debug, Formatter},
    sync::Arc,
};

use crate::ids::{Owner, SessionHash};

/// A session that is another's now, although it was here.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    /// The session's id, to close it by.
    pub(crate) id: Arc<str>,
    pub(crate) session: SessionHash,
    /// `None` if whoever asks for it next claims it.
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
