//! Finds the places in a body where bytes can be inserted without changing its events.

use super::lines::{Lines, Piece};

/// Finds the places between two events in a body.
///
/// The start of the body counts as such a place, and so does the end of a comment between events. If a CR LF has been split, its
/// line feed might still follow, but after an injected message that is only a blank line, which does not end any event.
#[derive(Debug, Default)]
pub(crate) struct Boundary {
    lines: Lines,
    /// Whether the bytes so far end within a line.
    in_line: bool,
    /// Whether a line of an event has been read since the last blank line.
    in_event: bool,
}

// === impl Boundary ===

impl Boundary {
    /// Returns `true` if the bytes so far end between two events.
    pub(crate) fn is_at_event_boundary(&self) -> bool {
        !self.in_line && !self.in_event
    }

    /// Updates the state with the body's next frame.
    pub(crate) fn observe(&mut self, frame: &[u8]) {
        // A frame that ends with a blank line ends at a boundary. Most frames are complete events, so they take this path.
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
                // If the rest of the BOM does not follow, these bytes are the start of a line.
                Piece::PartOfBom => (self.in_line, self.in_event) = (true, true),
                Piece::Text { text, ends } => {
                    if !self.in_line && !text.is_empty() {
                        self.in_line = true;
                        // A comment does not belong to any event.
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
