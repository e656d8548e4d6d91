//! The places in a body at which bytes can be added without changing its events.

use super::lines::{Lines, Piece};

/// Follows a body to the places between two events.
///
/// The start of the body is such a place, and so is the one after a comment. A line feed that belongs to the carriage
/// return before it may still come: after what was put in it makes a blank line, which ends nothing.
#[derive(Debug, Default)]
pub(crate) struct Boundary {
    lines: Lines,
    /// Whether a line has begun and not ended.
    in_line: bool,
    /// Whether a line of an event has come since the last blank one.
    in_event: bool,
}

// === impl Boundary ===

impl Boundary {
    /// Whether the bytes so far end between two events.
    pub(crate) fn is_at_event_boundary(&self) -> bool {
        !self.in_line && !self.in_event
    }

    /// Follows the next frame of the body.
    pub(crate) fn observe(&mut self, frame: &[u8]) {
        // This ends with a blank line, whatever came before. Most frames are whole events that end so.
        if frame.ends_with(b"\n\n") || frame.ends_with(b"\r\n\r\n") {
            *self = Self {
                lines: Lines::after_start(),
                ..Self::default()
            };
            return;
        }
        let mut rest = frame;
        while let Some(piece) = self.lines.next(&mut rest) {
            match piece {
                Piece::Bom => (self.in_line, self.in_event) = (false, false),
                Piece::PartOfBom => (self.in_line, self.in_event) = (true, true),
                Piece::Text { text, ends } => {
                    if !self.in_line && !text.is_empty() {
                        self.in_line = true;
                        // A comment belongs to no event.
                        self.in_event |= !text.starts_with(b":");
                    }
                    if ends {
                        self.in_event &= self.in_line;
                        self.in_line = false;
                    }
                }
            }
        }
    }
}
