//! The server-sent events of a response body, read as its frames pass.
//!
//! Without a session manager, only the bytes of the response say whether a call was answered, and whether its client could
//! resume it. The [`Reader`] sees each frame once, as it came and before it goes on, and alters nothing. It promises:
//!
//! 1. **Events are those of the standard** (WHATWG HTML, section 9.2.6), ended by any of its three line
//!    ends, and none before its blank line. The type of an event means nothing: MCP has only messages.
//! 2. **An event without data counts too**, if it has an `id` or a `retry`: the standard does not dispatch such an event, but
//!    takes its id for the last one all the same. MCP primes a stream that way.
//! 3. **The cuts between frames change nothing**, except for the limit in 5.
//! 4. **Cost.** Each byte is looked at once for line ends and, in data, once as JSON. An event inside one
//!    frame is read where it is; one that is cut, or has several data lines, is gathered in a buffer that
//!    goes with it.
//! 5. **Limits.** A buffer takes 4 MiB of data; a longer event is [`Unclear`]. An `id` longer than 512 KiB is ignored. The ends
//!    of events are always known.
//!
//! ```text
//! data: {"jsonrpc":"2.0","id":7,"result":{…}}⏎      answers request 7
//! id: 1/0⏎                                          a client could resume after it
//! retry: 3000⏎                                      and would, after 3 s
//! ⏎                                                 the event
//! ```
//!
//! [`Unclear`]: Answers::Unclear

use bytes::{BufMut, Bytes, BytesMut};

use self::{
    event_block::{EventBlock, EventField},
    lines::{Lines, Piece},
};

mod bom_filter;
mod boundary;
mod event_block;
mod lines;

pub(crate) use self::{bom_filter::BomFilter, boundary::Boundary, event_block::StreamEvent};

/// A comment. It is not an event, and only shows whether the client is still there.
pub(crate) const COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// Reads the events of one response body.
#[derive(Default)]
pub(crate) struct Reader {
    lines: Lines,
    line: Line,
    /// The event that a frame has cut.
    cut: Option<EventBlock<'static>>,
}

/// How far the current line has come.
#[derive(Clone, Copy, Default)]
enum Line {
    /// Nothing of it has come.
    #[default]
    Start,
    /// It can still become this field. So many bytes of the name and its colon have come.
    Name(EventField, u8),
    /// The colon has come; one space after it is not of the value.
    Space(EventField),
    /// It goes on with the value.
    Value(EventField),
    /// A comment, or no field that matters.
    Other,
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
    pub(crate) fn read(&mut self, frame: &[u8], mut event: impl FnMut(StreamEvent<'_>)) {
        let mut block: EventBlock<'_> = self.cut.take().unwrap_or_default();
        let mut rest = frame;
        while let Some(piece) = self.lines.next(&mut rest) {
            match piece {
                Piece::PartOfBom => self.line = Line::Other,
                Piece::Bom => self.line = Line::Start,
                Piece::Text { text, ends } => {
                    let line = self.line.after(text, &mut block);
                    self.line = if ends { Line::Start } else { line };
                    if ends && line.end(&mut block) {
                        if let Some(ended) = block.event() {
                            event(ended);
                        }
                        block = EventBlock::default();
                    }
                }
            }
        }
        if !block.is_empty() {
            self.cut = Some(block.into_owned());
        }
    }
}

// === impl Line ===

impl Line {
    /// What the line is after `text`, which is on it. What of that is a value goes to `block`.
    fn after<'f>(mut self, mut text: &'f [u8], block: &mut EventBlock<'f>) -> Self {
        if let Self::Start = self {
            self = match text.first() {
                None => return Self::Start,
                Some(b'd') => Self::Name(EventField::Data, 0),
                Some(b'i') => Self::Name(EventField::Id, 0),
                Some(b'r') => Self::Name(EventField::Retry, 0),
                Some(_) => return Self::Other,
            };
        }
        if let Self::Name(field, came) = self {
            let left = field.name().get(usize::from(came)..).unwrap_or_default();
            match text.strip_prefix(left) {
                Some(rest) => text = rest,
                None if left.starts_with(text) => {
                    return Self::Name(field, came + text.len() as u8);
                }
                None => return Self::Other,
            }
            block.start(field);
            self = Self::Space(field);
        }
        if let (Self::Space(field), Some(first)) = (self, text.first()) {
            if *first == b' ' {
                text = text.get(1..).unwrap_or_default();
            }
            self = Self::Value(field);
        }
        if let Self::Value(field) = self {
            block.append(field, text);
        }
        self
    }

    /// Ends the line. Says whether it was blank.
    fn end(self, block: &mut EventBlock<'_>) -> bool {
        match self {
            Self::Start => return true,
            Self::Name(field, came) if usize::from(came) + 1 == field.name().len() => {
                block.start(field);
                block.end(field);
            }
            Self::Space(field) | Self::Value(field) => block.end(field),
            Self::Name(..) | Self::Other => {}
        }
        false
    }
}

#[cfg(test)]
mod tests;
