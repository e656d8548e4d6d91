//! The envelope of a JSON-RPC body: the part of it that the layer needs.

use std::iter;

use bytes::{Bytes, BytesMut};

mod parse_failure;
mod read;
mod scan;

pub use self::parse_failure::ParseFailure;
pub(crate) use self::parse_failure::UnparsedBody;
pub(crate) use self::read::{Answers, Message, Request, answers, read};

/// The largest body that is kept to be read: 4 MiB, which is also the most that rmcp accepts by default.
const MAX_BODY: usize = 4 * 1024 * 1024;

/// The most frames that are kept: 16,384, so that a body of 4 MiB may come in pieces of 256 bytes. A client
/// that sends it byte by byte would have each byte cost a handle of 32.
const MAX_FRAMES: usize = 16 * 1024;

/// The frames of a whole body.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    first: Bytes,
    /// Most bodies come in one frame.
    rest: Option<Box<Rest>>,
}

/// The frames after the first.
#[derive(Debug, Default)]
struct Rest {
    frames: Vec<Bytes>,
    length: usize,
}

// === impl Frames ===

impl Frames {
    /// `false` if that is too much.
    pub(crate) fn push(&mut self, bytes: Bytes) -> bool {
        if bytes.is_empty() {
            // Nothing to keep, and there may be any number of them.
            return true;
        }
        if self.first.is_empty() {
            self.first = bytes;
            return self.first.len() <= MAX_BODY;
        }
        let rest = self.rest.get_or_insert_default();
        rest.length = rest.length.saturating_add(bytes.len());
        rest.frames.push(bytes);
        self.first.len().saturating_add(rest.length) <= MAX_BODY && rest.frames.len() < MAX_FRAMES
    }

    /// What is there of a body that is not kept any further.
    pub(crate) fn unparsed(self, why: ParseFailure) -> UnparsedBody {
        let rest = self.rest.iter().flat_map(|rest| &rest.frames);
        let mut frames = iter::once(&self.first)
            .chain(rest)
            .map(|frame| frame.trim_ascii_start());
        let beginning = frames.find(|frame| !frame.is_empty());
        UnparsedBody {
            why,
            is_ambiguous: why.is_ambiguous(beginning.unwrap_or_default()),
        }
    }

    /// The body in one piece: without a copy if it came in one frame.
    pub(crate) fn into_bytes(self) -> Bytes {
        let Some(rest) = self.rest else {
            return self.first;
        };
        let mut whole = BytesMut::with_capacity(self.first.len() + rest.length);
        whole.extend_from_slice(&self.first);
        for bytes in &rest.frames {
            whole.extend_from_slice(bytes);
        }
        whole.freeze()
    }
}
