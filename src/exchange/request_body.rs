//! The state of a request body that passes.

use crate::{
    call::{CallId, Key},
    envelope::{Frames, ParseFailure, UnparsedBody},
};

/// What is known of the request body.
#[derive(Default)]
pub(super) enum RequestBody {
    #[default]
    Passing,
    /// It has ended. One that the layer cannot read stays so until no session manager can bind its call.
    Ended(Result<Frames, UnparsedBody>),
    /// It was dropped before its end.
    Dropped(UnparsedBody),
    /// Somebody reads it. A session manager that binds the call meanwhile comes first.
    Reading,
    /// Read, or not needed any more.
    Known(BodyKind),
}

/// What a body turned out to be that carries no call to watch.
pub(super) enum BodyKind {
    /// A call, or plainly nothing that is JSON-RPC.
    Plain,
    /// JSON-RPC, or what may be; but no call that is watched.
    Other,
    /// The client's own cancel of a call that was in flight then. In a box: few bodies are one.
    Cancel(Box<(Key, CallId)>),
    /// A call for which there was no room. What is in here lasts until the server took the request or refused it.
    Untracked(Option<Box<dyn Contested>>),
}

/// The call in flight whose id a request has that is not tracked.
pub(super) trait Contested: Send {
    /// The server took the request: the call is no longer tracked.
    fn lose(self: Box<Self>);
}

// === impl BodyKind ===

impl BodyKind {
    /// A body that could not be read.
    pub(super) fn unparsed(is_ambiguous: bool) -> Self {
        if is_ambiguous {
            Self::Other
        } else {
            Self::Plain
        }
    }
}

// === impl RequestBody ===

impl RequestBody {
    /// What is known of one that was dropped before its end.
    pub(super) fn as_dropped(&self) -> Option<UnparsedBody> {
        match self {
            Self::Dropped(body) => Some(*body),
            _ => None,
        }
    }

    /// Whether it was read, or need not be, and is not JSON-RPC beyond doubt.
    pub(super) fn is_plain(&self) -> bool {
        match self {
            Self::Passing | Self::Reading | Self::Ended(Ok(_)) => false,
            Self::Ended(Err(body)) | Self::Dropped(body) => {
                !body.is_ambiguous && body.why != ParseFailure::NotRead
            }
            Self::Known(settled) => matches!(settled, BodyKind::Plain),
        }
    }

    /// Whether that the client has left means nothing for its request: it is, or may be, JSON-RPC without a call.
    pub(super) fn is_other(&self) -> bool {
        match self {
            Self::Passing | Self::Reading | Self::Ended(Ok(_)) => false,
            Self::Ended(Err(body)) | Self::Dropped(body) => body.is_ambiguous,
            Self::Known(settled) => !matches!(settled, BodyKind::Plain),
        }
    }

    /// Whether it is a call for which there was no room.
    pub(super) fn is_untracked(&self) -> bool {
        matches!(self, Self::Known(BodyKind::Untracked(_)))
    }

    /// Takes the contest of a call for which there was no room.
    pub(super) fn take_contest(&mut self) -> Option<Box<dyn Contested>> {
        match self {
            Self::Known(BodyKind::Untracked(contest)) => contest.take(),
            _ => None,
        }
    }
}
