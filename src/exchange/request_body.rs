//! What is known of a request body that passes.

use crate::{
    call::{CallId, Key},
    envelope::{Frames, Unknown},
};

/// What is known of the request body.
pub(super) enum RequestBody {
    Passing,
    Ended(Result<Frames, Unknown>),
    /// Somebody reads it. A session manager that binds the call meanwhile comes first.
    Reading,
    /// Read, or not needed any more.
    Settled(Settled),
}

/// What a body turned out to be that carries no call to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Settled {
    /// A call, or nothing that is JSON-RPC.
    Plain,
    /// JSON-RPC, or an array, which may be; but no call.
    Other,
    /// The client's own cancel of a call that was in flight then. In a box: few bodies are one.
    Cancel(Box<(Key, CallId)>),
}

// === impl RequestBody ===

impl RequestBody {
    /// Whether it was dropped before its end.
    pub(super) fn is_unread(&self) -> bool {
        matches!(self, Self::Ended(Err(Unknown::NotRead)))
    }
}
