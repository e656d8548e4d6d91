//! Reads the server-sent events in a response body, frame by frame.
//!
//! Without a session manager, only the response's bytes show whether a call has been answered and whether its client can resume
//! it. The [`Reader`] reads each frame once, before it is sent, and does not alter anything. Its guarantees:
//!
//! 1. **Events are read as the standard defines them** (WHATWG HTML, section 9.2.6), with any of its three line endings. An event
//!    ends at its blank line. Its type is ignored, because MCP only has messages.
//! 2. **An event without data is reported, too**, if it has an `id` or a `retry`. The standard does not dispatch such an event,
//!    but its id still becomes the last event id, which is how MCP primes a stream.
//! 3. **Frame boundaries make no difference**, except for the limit in 5.
//! 4. **Cost.** Each byte is scanned once for line endings and, if it is data, parsed once as JSON. An event inside a single
//!    frame is read in place. An event split across frames, or with several data lines, is copied into its own buffer.
//! 5. **Limits.** A buffer holds up to 4 MiB of data. An event needing a larger buffer is [`Ambiguous`]. An `id` longer than 512
//!    KiB is ignored. Even then, the end of every event is found.
//!
//! ```text
//! data: {"jsonrpc":"2.0","id":7,"result":{…}}⏎      answers request 7
//! id: 1/0⏎                                          a client could resume after it
//! retry: 3000⏎                                      the reconnect delay: 3 s
//! ⏎                                                 ends the event
//! ```
//!
//! [`Ambiguous`]: crate::envelope::Answers::Ambiguous

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

/// A comment. It is not an event, and only serves to detect a disconnected client.
pub(crate) const COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// Reads the events in one response body.
#[derive(Default)]
pub(crate) struct Reader {
    lines: Lines,
    line: Line,
    /// The incomplete event at the end of the last frame.
    incomplete: Option<EventBlock<'static>>,
}

/// The state of the current line.
#[derive(Clone, Copy, Default)]
enum Line {
    /// No byte of the line has been received yet.
    #[default]
    Start,
    /// The line might be this field. The number is how many bytes of the field's name and colon have been received so far.
    Name(EventField, u8),
    /// Just after the colon. A space at this point is not part of the value.
    Space(EventField),
    /// Within the value.
    Value(EventField),
    /// A comment or an ignored field.
    Other,
}

/// Returns an event with `data`, which must not contain line breaks.
pub(crate) fn event(data: &[u8]) -> Bytes {
    let mut event = BytesMut::with_capacity(data.len() + 8);
    event.put_slice(b"data: ");
    event.put_slice(data);
    event.put_slice(b"\n\n");
    event.freeze()
}

// === impl Reader ===

impl Reader {
    /// Reads the body's next frame, and calls `event` for every event that ends in it, in order.
    pub(crate) fn read(&mut self, frame: &[u8], mut event: impl FnMut(StreamEvent<'_>)) {
        let mut block: EventBlock<'_> = self.incomplete.take().unwrap_or_default();
        let mut rest = frame;
        while let Some(piece) = self.lines.next(&mut rest) {
            match piece {
                Piece::PartOfBom => self.line = Line::Other,
                Piece::Bom => self.line = Line::Start,
                Piece::Text { text, ends } => {
                    let line = self.line.advance(text, &mut block);
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
            self.incomplete = Some(block.into_owned());
        }
    }
}

// === impl Line ===

impl Line {
    /// Returns the state after `text`, and appends the value to `block`.
    fn advance<'f>(mut self, mut text: &'f [u8], block: &mut EventBlock<'f>) -> Self {
        if let Self::Start = self {
            self = match text.first() {
                None => return Self::Start,
                Some(b'd') => Self::Name(EventField::Data, 0),
                Some(b'i') => Self::Name(EventField::Id, 0),
                Some(b'r') => Self::Name(EventField::Retry, 0),
                Some(_) => return Self::Other,
            };
        }
        if let Self::Name(field, received) = self {
            let left = field
                .name()
                .get(usize::from(received)..)
                .unwrap_or_default();
            match text.strip_prefix(left) {
                Some(rest) => text = rest,
                None if left.starts_with(text) => {
                    return Self::Name(field, received + text.len() as u8);
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

    /// Ends the line. Returns `true` if it was blank.
    fn end(self, block: &mut EventBlock<'_>) -> bool {
        match self {
            Self::Start => return true,
            // A line that consists of a field's name, without a colon, sets the field to an empty value.
            Self::Name(field, received) if usize::from(received) + 1 == field.name().len() => {
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
