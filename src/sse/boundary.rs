//! Where something can be put into a body without changing its events.

use std::mem;

use memchr::memchr2;

use super::MARK;

/// Follows a body to the places between two events.
///
/// The start of the body is such a place, and so is the one after a comment, which belongs to no event.
/// After a carriage return a line feed may still come: parted from it by what was put in, it makes a
/// blank line that ends nothing.
#[derive(Debug)]
pub(crate) struct Boundary {
    /// What of a byte order mark has not come. Empty once it came, or something else did.
    mark: &'static [u8],
    after_return: bool,
    line: Line,
    /// Whether a line of an event has come since the last blank one.
    in_event: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Start,
    Comment,
    Other,
}

// === impl Boundary ===

impl Boundary {
    /// Whether the bytes so far end between two events.
    pub(crate) fn is_here(&self) -> bool {
        self.line == Line::Start && !self.in_event
    }

    /// Follows the next frame of the body.
    pub(crate) fn pass(&mut self, frame: &[u8]) {
        // Whatever came before, this is a blank line. Most frames are whole events that end so.
        if frame.ends_with(b"\n\n") || frame.ends_with(b"\r\n\r\n") {
            *self = Self {
                mark: &[],
                ..Self::default()
            };
            return;
        }
        let mut rest = self.skip_mark(frame);
        while !rest.is_empty() {
            if mem::take(&mut self.after_return) && rest.starts_with(b"\n") {
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            let end = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            let (text, line_end) = rest.split_at_checked(end).unwrap_or_default();
            self.go_on(text);
            let Some((byte, next)) = line_end.split_first() else {
                return;
            };
            self.after_return = *byte == b'\r';
            if mem::replace(&mut self.line, Line::Start) == Line::Start {
                self.in_event = false;
            }
            rest = next;
        }
    }

    fn go_on(&mut self, text: &[u8]) {
        match text.first() {
            Some(b':') if self.line == Line::Start => self.line = Line::Comment,
            Some(_) if self.line == Line::Start => {
                self.line = Line::Other;
                self.in_event = true;
            }
            _ => {}
        }
    }

    /// Skips the byte order mark, or what of it is here.
    fn skip_mark<'f>(&mut self, mut frame: &'f [u8]) -> &'f [u8] {
        while let Some((wanted, left)) = self.mark.split_first() {
            match frame.split_first() {
                Some((byte, rest)) if byte == wanted => {
                    frame = rest;
                    self.mark = left;
                    // A part of a mark is no mark, but a line that begins like no field.
                    self.in_event = !left.is_empty();
                    self.line = match left {
                        [] => Line::Start,
                        _ => Line::Other,
                    };
                }
                Some(_) => self.mark = &[],
                None => break,
            }
        }
        frame
    }
}

impl Default for Boundary {
    /// At the start of a body.
    fn default() -> Self {
        Self {
            mark: MARK,
            after_return: false,
            line: Line::Start,
            in_event: false,
        }
    }
}
