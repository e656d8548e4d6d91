//! Splits a body into lines, regardless of how it is split into frames.

use std::mem;

use memchr::memchr2;

/// The byte order mark that a body can start with.
pub(super) const BOM: &[u8] = b"\xef\xbb\xbf";

/// Splits a body into lines, at any of the three line endings.
///
/// A byte order mark at the start does not belong to any line.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Number of BOM bytes received so far, or [`BOM_LEN`] once any other byte has been received.
    bom_bytes: u8,
    /// Whether the last byte was a carriage return. A line feed after it is part of the same line ending.
    after_return: bool,
}

const BOM_LEN: u8 = BOM.len() as u8;

/// The next piece of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece<'f> {
    /// A part of the BOM. If the rest does not follow, the line is not a known field.
    PartOfBom,
    /// The end of the BOM.
    Bom,
    /// Text of the line, up to its end or the end of the frame.
    Text { text: &'f [u8], ends: bool },
}

// === impl Lines ===

impl Lines {
    /// Returns the state after a line feed, past the start of the body.
    pub(super) fn after_start() -> Self {
        Self {
            bom_bytes: BOM_LEN,
            after_return: false,
        }
    }

    /// Removes and returns the next piece of `frame`, or `None` at its end.
    pub(super) fn next<'f>(&mut self, frame: &mut &'f [u8]) -> Option<Piece<'f>> {
        let (first, rest) = frame.split_first()?;
        if let Some(expected) = BOM.get(usize::from(self.bom_bytes)) {
            if first == expected {
                *frame = rest;
                self.bom_bytes += 1;
                return Some(match self.bom_bytes {
                    BOM_LEN => Piece::Bom,
                    _ => Piece::PartOfBom,
                });
            }
            self.bom_bytes = BOM_LEN;
        }
        if mem::take(&mut self.after_return) && *first == b'\n' {
            // The carriage return before this line feed has already ended the line.
            *frame = rest;
            return self.next(frame);
        }
        let end = match first {
            b'\n' | b'\r' => Some(0),
            _ => memchr2(b'\n', b'\r', frame),
        };
        let cut = end.and_then(|end| frame.split_at_checked(end));
        let (text, ends) = match cut {
            Some((text, [end, rest @ ..])) => {
                *frame = rest;
                self.after_return = *end == b'\r';
                (text, true)
            }
            _ => (mem::take(frame), false),
        };
        Some(Piece::Text { text, ends })
    }
}
