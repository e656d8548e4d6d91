//! The server-sent events of a response body, read as its frames pass.
//!
//! Without a session manager that tells, only the bytes of the response say whether a call was
//! answered, and whether its client could resume it. The [`Reader`] sees each frame once, as it
//! came and before it goes on, and alters nothing. What it promises:
//!
//! 1. **Events are those of the standard** (WHATWG HTML, section 9.2.6), ended by any of its three line
//!    ends, and none before its blank line. The type of an event means nothing: MCP has only messages.
//! 2. **What has no data counts too**, if it has an `id` or a `retry`: the standard does not dispatch
//!    such an event, but takes its id for the last one all the same. MCP primes a stream that way.
//! 3. **How the body is cut into frames changes nothing**, but for the limit in 5.
//! 4. **Cost.** Each byte is looked at once for line ends and, in data, once as JSON. An event inside one
//!    frame is read where it is; one that is cut, or has several data lines, is gathered in a buffer that
//!    goes with it.
//! 5. **Limits.** A buffer takes 4 MiB of data; what is longer is [`Unclear`]. An `id` longer than 512 KiB
//!    is ignored. Where events end is always known.
//!
//! ```text
//! data: {"jsonrpc":"2.0","id":7,"result":{…}}⏎      answers request 7
//! id: 1/0⏎                                          a client could resume after it
//! retry: 3000⏎                                      and would, after 3 s
//! ⏎                                                 the event
//! ```
//!
//! [`Unclear`]: Answers::Unclear

use std::{mem, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};

use self::{
    block::Block,
    lines::{Lines, Piece},
};
use crate::envelope::Answers;

mod block;
mod boundary;
mod lines;
mod start;

pub(crate) use self::{boundary::Boundary, start::Start};

/// A comment, which is no event: it only shows whether the client is still there.
pub(crate) const COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// The byte order mark that a body may start with.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// What one event says about the calls on its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event<'a> {
    /// Its `id`, as it was sent. An empty one: the client has no last event id any more.
    pub(crate) id: Option<&'a [u8]>,
    /// How long the client should wait before it comes back, at most 10 minutes.
    pub(crate) retry: Option<Duration>,
    /// What its data answers.
    pub(crate) answers: Answers,
}

/// Reads the events of one response body.
pub(crate) struct Reader {
    lines: Lines,
    line: Line,
    block: Block<'static>,
}

/// How far the current line has come.
#[derive(Clone, Copy)]
enum Line {
    /// Nothing of it has come.
    Start,
    /// It can still become this field. This much of the name and its colon has not come.
    Name(Field, &'static [u8]),
    /// The colon has come; one space after it is not of the value.
    Space(Field),
    /// It goes on with the value.
    Value(Field),
    /// A comment, which belongs to no event.
    Comment,
    /// No field that matters.
    Other,
}

#[derive(Clone, Copy)]
enum Field {
    Data,
    Id,
    Retry,
}

/// An event with this data, which has no line ends in it.
pub(crate) fn event(data: &[u8]) -> Bytes {
    let mut event = BytesMut::with_capacity(data.len() + 8);
    event.put_slice(b"data: ");
    event.put_slice(data);
    event.put_slice(b"\n\n");
    event.freeze()
}

// === impl Reader ===

impl Reader {
    /// Reads the next frame of the body and gives every event that ends in it to `event`, in order.
    pub(crate) fn read(&mut self, frame: &[u8], mut event: impl FnMut(Event<'_>)) {
        let mut block: Block<'_> = mem::take(&mut self.block);
        let mut rest = frame;
        while let Some(piece) = self.lines.next(&mut rest) {
            match piece {
                Piece::PartOfMark => self.line = Line::Other,
                Piece::Mark => self.line = Line::Start,
                Piece::Text(text) => self.line.go_on(text, &mut block),
                Piece::End => {
                    let is_blank = self.line.end(&mut block);
                    if is_blank && let Some(ended) = mem::take(&mut block).event() {
                        event(ended);
                    }
                }
            }
        }
        self.block = block.keep();
    }
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            lines: Lines::default(),
            line: Line::Start,
            block: Block::default(),
        }
    }
}

// === impl Line ===

impl Line {
    /// Reads `text`, which is on the line. What of it is a value goes to `block`.
    fn go_on<'f>(&mut self, mut text: &'f [u8], block: &mut Block<'f>) {
        while let Some(first) = text.first() {
            match *self {
                Self::Start => {
                    *self = match first {
                        b'd' => Self::Name(Field::Data, b"data:"),
                        b'i' => Self::Name(Field::Id, b"id:"),
                        b'r' => Self::Name(Field::Retry, b"retry:"),
                        b':' => Self::Comment,
                        _ => Self::Other,
                    };
                }
                Self::Name(field, left) => {
                    if let Some(rest) = text.strip_prefix(left) {
                        *self = Self::Space(field);
                        block.start(field);
                        text = rest;
                    } else if let Some(left) = left.strip_prefix(text) {
                        *self = Self::Name(field, left);
                        return;
                    } else {
                        *self = Self::Other;
                    }
                }
                Self::Space(field) => {
                    *self = Self::Value(field);
                    text = text.strip_prefix(b" ").unwrap_or(text);
                }
                Self::Value(field) => {
                    block.go_on(field, text);
                    return;
                }
                Self::Comment | Self::Other => return,
            }
        }
    }

    /// Ends the line. Says whether it was blank.
    fn end(&mut self, block: &mut Block<'_>) -> bool {
        match mem::replace(self, Self::Start) {
            Self::Start => return true,
            Self::Name(field, b":") => {
                block.start(field);
                block.end(field);
            }
            Self::Space(field) | Self::Value(field) => block.end(field),
            Self::Name(..) | Self::Other | Self::Comment => {}
        }
        false
    }
}

#[cfg(test)]
mod tests;
