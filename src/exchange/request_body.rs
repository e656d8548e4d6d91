//! What the layer knows about a request body passing through it.

use crate::{
    call::{CallId, Key},
    envelope::{Frames, ParseFailure, UnparsedBody},
};

/// What is known about the request body.
#[derive(Default)]
pub(super) enum RequestBody {
    #[default]
    Passing,
    /// The body has ended. If it cannot be parsed, it stays in this state until no session manager can bind the call any more.
    Ended(Result<Frames, UnparsedBody>),
    /// The body was dropped before it ended.
    Dropped(UnparsedBody),
    /// The body is being parsed. A session manager that binds the call in the meantime takes precedence.
    Parsing,
    /// The body's kind is known, because it has been parsed or no longer needs to be.
    Known(BodyKind),
}

/// The kind of message a request body contains.
pub(super) enum BodyKind {
    /// A tracked call, or certainly not JSON-RPC.
    Plain,
    /// Certainly or possibly JSON-RPC, but not a tracked call.
    Other,
    /// The client's own cancellation of a call that was in flight at the time. Boxed, because few bodies are cancellations.
    Cancel(Box<(Key, CallId)>),
    /// A call over the limit. Its contest, if any, lasts until the server has accepted or refused the request.
    Untracked(Option<Box<dyn Contested>>),
}

/// An in-flight call with the same id as an untracked request.
pub(super) trait Contested: Send {
    /// Untracks the in-flight call, because the server has accepted the request.
    fn on_accepted(self: Box<Self>);
}

// === impl BodyKind ===

impl BodyKind {
    /// Returns the kind of a body that could not be parsed.
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
    /// Returns the body if it was dropped before it ended.
    pub(super) fn as_dropped(&self) -> Option<UnparsedBody> {
        match self {
            Self::Dropped(body) => Some(*body),
            _ => None,
        }
    }

    /// Returns `true` if the body is a tracked call, or certainly not JSON-RPC.
    pub(super) fn is_plain(&self) -> bool {
        match self {
            Self::Passing | Self::Parsing | Self::Ended(Ok(_)) => false,
            Self::Ended(Err(body)) | Self::Dropped(body) => {
                !body.is_ambiguous && body.reason != ParseFailure::NotRead
            }
            Self::Known(kind) => matches!(kind, BodyKind::Plain),
        }
    }

    /// Returns `true` if the body is, or may be, JSON-RPC without a tracked call.
    ///
    /// In that case, a disconnect has no effect on the request.
    pub(super) fn is_other(&self) -> bool {
        match self {
            Self::Passing | Self::Parsing | Self::Ended(Ok(_)) => false,
            Self::Ended(Err(body)) | Self::Dropped(body) => body.is_ambiguous,
            Self::Known(kind) => !matches!(kind, BodyKind::Plain),
        }
    }

    /// Returns `true` if the body is a call over the limit.
    pub(super) fn is_untracked(&self) -> bool {
        matches!(self, Self::Known(BodyKind::Untracked(_)))
    }

    /// Takes the contest of a call over the limit.
    pub(super) fn take_contest(&mut self) -> Option<Box<dyn Contested>> {
        match self {
            Self::Known(BodyKind::Untracked(contest)) => contest.take(),
            _ => None,
        }
    }
}
