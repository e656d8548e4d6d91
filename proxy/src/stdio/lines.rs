//! Splits bytes into lines, in bounded memory.

use bytes::{Buf as _, Bytes, BytesMut};
use memchr::memchr;

use crate::message::{IdKey, Scanner};

/// Maximum length of a line. This is more than clients accept.
pub const MAX_LINE: usize = 16 * 1024 * 1024;

/// Maximum number of bytes to retain of an overlong line.
const MAX_EXCERPT: usize = 200;

/// Capacity above which the buffer is replaced by a smaller one.
///
/// The buffer is replaced once it holds no more than [`READ_SIZE`] bytes.
const KEPT_CAPACITY: usize = 64 * 1024;

/// Minimum free capacity of the buffer before a read.
const READ_SIZE: usize = 16 * 1024;

/// The byte order mark, which servers written in .NET or PowerShell emit first.
///
/// It is stripped from lines.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Splits a process's output into lines.
///
/// This holds at most one line of the maximum length, plus whatever was read along with the line's end.
#[derive(Debug)]
pub struct Lines {
    max: usize,
    buffer: BytesMut,
    /// Number of bytes at the start of the buffer known to contain no line break.
    scanned: usize,
    /// Set while the current line is overlong. Its bytes are then discarded as they are read.
    skipped: Option<Skipped>,
}

/// A non-empty line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A complete line, without surrounding white space or a leading byte order mark.
    ///
    /// Copy the line if you want to hold on to it, because it keeps the entire buffer allocated.
    Whole(Bytes),
    /// An overlong line, which has been discarded.
    TooLong {
        /// The line's first bytes.
        prefix: Bytes,
        /// The id of the call that the line answers, if it is an answer.
        answers: Option<IdKey>,
    },
}

/// The state of an overlong line.
#[derive(Debug)]
struct Skipped {
    prefix: Bytes,
    scanner: Scanner,
}

// === impl Lines ===

impl Lines {
    /// Creates a splitter for lines of up to `max` bytes.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self {
            max,
            buffer: BytesMut::new(),
            scanned: 0,
            skipped: None,
        }
    }

    /// Returns the buffer to read more bytes into. Take all complete lines first.
    pub fn buffer(&mut self) -> &mut BytesMut {
        self.buffer.reserve(READ_SIZE);
        if self.buffer.capacity() > KEPT_CAPACITY && self.buffer.len() <= READ_SIZE {
            let mut smaller = BytesMut::with_capacity(self.buffer.len() + READ_SIZE);
            smaller.extend_from_slice(&self.buffer);
            self.buffer = smaller;
        }
        &mut self.buffer
    }

    /// Returns the next complete, non-empty line, or `None` if more bytes are needed.
    pub fn next_line(&mut self) -> Option<Line> {
        loop {
            let new = self.buffer.get(self.scanned..).unwrap_or_default();
            let Some(end) = memchr(b'\n', new).map(|at| self.scanned + at) else {
                self.scanned = self.buffer.len();
                self.discard_overlong();
                return None;
            };
            self.scanned = 0;
            let text = self.buffer.split_to(end).freeze();
            self.buffer.advance(1);
            let line = self.finish_line(text);
            if line.is_some() {
                return line;
            }
        }
    }

    /// Returns the text after the output's last line break, or `None` if that text is empty.
    pub fn last_line(&mut self) -> Option<Line> {
        self.scanned = 0;
        let text = self.buffer.split().freeze();
        self.finish_line(text)
    }

    /// Discards the current, unterminated line if it is overlong.
    fn discard_overlong(&mut self) {
        if self.skipped.is_none() && self.buffer.len() > self.max {
            self.skipped = Some(Skipped::new(&self.buffer));
        }
        if let Some(skipped) = &mut self.skipped {
            skipped.scanner.read(&self.buffer);
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.buffer.clear();
        self.scanned = 0;
    }

    /// Returns the line that ends with `text`, or `None` if it is empty.
    fn finish_line(&mut self, text: Bytes) -> Option<Line> {
        let is_too_long = text.len() > self.max;
        let skipped = self.skipped.take();
        if let Some(mut skipped) = skipped.or_else(|| is_too_long.then(|| Skipped::new(&text))) {
            skipped.scanner.read(&text);
            return Some(skipped.into_line());
        }
        let line = text.strip_prefix(BOM).unwrap_or(&text).trim_ascii();
        (!line.is_empty()).then(|| Line::Whole(text.slice_ref(line)))
    }
}

// === impl Skipped ===

impl Skipped {
    fn new(text: &[u8]) -> Self {
        let prefix = text.get(..MAX_EXCERPT).unwrap_or(text);
        Self {
            prefix: Bytes::copy_from_slice(prefix),
            scanner: Scanner::default(),
        }
    }

    fn into_line(self) -> Line {
        Line::TooLong {
            prefix: self.prefix,
            answers: self.scanner.answers_with_version(),
        }
    }
}

impl Default for Lines {
    fn default() -> Self {
        Self::new(MAX_LINE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Splits these pieces into lines.
    fn cut<'a>(max: usize, pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Line> {
        let mut lines = Lines::new(max);
        let mut cut = Vec::new();
        for piece in pieces {
            lines.buffer().extend_from_slice(piece);
            cut.extend(std::iter::from_fn(|| lines.next_line()));
            assert!(lines.buffer.len() <= max, "the buffer keeps too much");
        }
        cut.extend(lines.last_line());
        cut
    }

    fn whole(text: &'static str) -> Line {
        Line::Whole(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn lines_end_with_either_line_break_and_empty_ones_are_skipped() {
        let lines = cut(100, [&b"one\r\n\n  \r\n two \nthr"[..], b"ee"]);
        assert_eq!(lines, [whole("one"), whole("two"), whole("three")]);
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_a_line() {
        let lines = cut(
            100,
            [&b"\xef\xbb"[..], b"\xbf{}\r\n\xef\xbb\xbf\n\xef\xbb\n"],
        );
        let other = Line::Whole(Bytes::from_static(b"\xef\xbb"));
        assert_eq!(lines, [whole("{}"), other]);
    }

    #[test]
    fn an_endless_line_is_reported_once_and_the_next_one_is_read() {
        let pieces = (0..1_000).map(|_| &b"xxxxxxxxxx"[..]);
        let lines = cut(64, pieces.chain([&b"x\nnext\n"[..]]));
        assert!(matches!(&lines[..], [Line::TooLong { .. }, next] if *next == whole("next")));
    }

    #[test]
    fn the_call_answered_by_an_overlong_line_is_found() {
        let line =
            br#"{"result":{"id":8,"text":"xxxxxxxxxxxxxxxxxxxxxxxx"},"jsonrpc":"2.0","id":7}"#;
        for size in [1, 10, 100] {
            for end in [&b""[..], b"\n", b"\r\n"] {
                let lines = cut(16, line.chunks(size).chain([end]));
                let [Line::TooLong { prefix, answers }] = &lines[..] else {
                    panic!("{lines:?}");
                };
                assert!(line.starts_with(prefix));
                assert_eq!(*answers, IdKey::of("7"));
            }
        }
    }

    #[test]
    fn a_line_may_have_the_maximum_length_and_no_more() {
        assert_eq!(cut(4, [&b"1234\n"[..]]), [whole("1234")]);
        let too_long = Line::TooLong {
            prefix: Bytes::from_static(b"12345"),
            answers: None,
        };
        assert_eq!(cut(4, [&b"12345\n6"[..]]), [too_long, whole("6")]);
    }

    #[test]
    fn a_large_line_leaves_no_large_buffer() {
        let mut lines = Lines::default();
        lines.buffer().extend_from_slice(&vec![b'x'; 1 << 20]);
        lines.buffer().extend_from_slice(b"\n");
        assert!(matches!(lines.next_line(), Some(Line::Whole(line)) if line.len() == 1 << 20));
        assert_eq!(lines.next_line(), None);
        assert!(lines.buffer().capacity() <= 2 * KEPT_CAPACITY);
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_bytes_are_split(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b' '), b'a'..=b'e'], 0..200),
            sizes in proptest::collection::vec(1_usize..20, 1..50),
        ) {
            let mut pieces = Vec::new();
            let (mut rest, mut sizes) = (&bytes[..], sizes.iter().cycle());
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                pieces.push(piece);
                rest = after;
            }
            let expected: Vec<_> = bytes
                .split(|byte| *byte == b'\n')
                .filter_map(|line| match line {
                    line if line.len() > 8 => Some(None),
                    line if line.trim_ascii().is_empty() => None,
                    line => Some(Some(Bytes::copy_from_slice(line.trim_ascii()))),
                })
                .collect();
            let got: Vec<_> = cut(8, pieces)
                .into_iter()
                .map(|line| match line {
                    Line::Whole(line) => Some(line),
                    Line::TooLong { .. } => None,
                })
                .collect();
            prop_assert_eq!(got, expected);
        }
    }
}
