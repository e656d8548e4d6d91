//! The places in a body where something can be put in without changing its events.

use super::lines::{Lines, Piece};

/// Follows a body to the places between two events.
///
/// The start of the body is such a place, and so is the one after a comment, which belongs to no event.
/// After a carriage return a line feed may still come: parted from it by what was put in, it makes a
/// blank line that ends nothing.
#[derive(Debug, Default)]
pub(crate) struct Boundary {
    lines: Lines,
    line: Line,
    /// Whether a line of an event has come since the last blank one.
    in_event: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Line {
    #[default]
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
        // This ends with a blank line, whatever came before. Most frames are whole events that end so.
        if frame.ends_with(b"\n\n") || frame.ends_with(b"\r\n\r\n") {
            *self = Self {
                lines: Lines::begun(),
                ..Self::default()
            };
            return;
        }
        let mut rest = frame;
        while let Some(piece) = self.lines.next(&mut rest) {
            match piece {
                Piece::Mark => (self.line, self.in_event) = (Line::Start, false),
                Piece::PartOfMark => (self.line, self.in_event) = (Line::Other, true),
                Piece::Text { text, ends } => {
                    if self.line == Line::Start && !text.is_empty() {
                        let is_comment = text.starts_with(b":");
                        self.line = match is_comment {
                            true => Line::Comment,
                            false => Line::Other,
                        };
                        self.in_event |= !is_comment;
                    }
                    if ends {
                        self.in_event &= self.line != Line::Start;
                        self.line = Line::Start;
                    }
                }
            }
        }
    }
}
