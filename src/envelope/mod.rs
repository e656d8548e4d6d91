//! Reads a JSON-RPC body's envelope, which is the only part the layer needs.

use std::iter;

use bytes::{Bytes, BytesMut};

mod parse_failure;
mod read;
mod scan;

pub use self::parse_failure::ParseFailure;
pub(crate) use self::parse_failure::UnparsedBody;
pub(crate) use self::read::{Answers, Message, Request, answers, read};

/// Maximum size of a body to parse, which is also rmcp's default limit.
const MAX_BODY: usize = 4 * 1024 * 1024;

/// Maximum number of frames buffered for a body.
///
/// This is enough for a 4 MiB body in frames of 256 bytes. There has to be a limit, because each frame costs a 32-byte handle, no matter
/// how small the frame is.
const MAX_FRAMES: usize = 16 * 1024;

/// A body's frames, buffered until the body ends.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    first: Bytes,
    /// `None` for most bodies, which have one frame.
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
    /// Adds a frame. Returns `false` if the body exceeds [`MAX_BODY`] or [`MAX_FRAMES`].
    pub(crate) fn push(&mut self, bytes: Bytes) -> bool {
        if bytes.is_empty() {
            // Drop empty frames, because there can be any number of them.
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

    /// Drops the frames of a body that will not be parsed.
    ///
    /// Returns the `reason`, along with whether the body may be JSON-RPC.
    pub(crate) fn unparsed(self, reason: ParseFailure) -> UnparsedBody {
        let rest = self.rest.iter().flat_map(|rest| &rest.frames);
        let mut frames = iter::once(&self.first)
            .chain(rest)
            .map(|frame| frame.trim_ascii_start());
        let prefix = frames.find(|frame| !frame.is_empty());
        UnparsedBody {
            reason,
            is_ambiguous: reason.is_ambiguous(prefix.unwrap_or_default()),
        }
    }

    /// Returns the body in one piece, without copying it if it has only one frame.
    pub(crate) fn into_bytes(self) -> Bytes {
        let Some(rest) = self.rest else {
            return self.first;
        };
        let mut body = BytesMut::with_capacity(self.first.len() + rest.length);
        body.extend_from_slice(&self.first);
        for frame in &rest.frames {
            body.extend_from_slice(frame);
        }
        body.freeze()
    }
}
