//! Parses a server's event stream into events that can be forwarded to a client.
//!
//! 1. Events are parsed as the standard requires (WHATWG HTML, section 9.2.6), including its three line endings, a byte order
//!    mark at the start, comments, and events with several data lines. A body's frames may split an event anywhere.
//! 2. An event's `event` and `data` lines are forwarded unchanged, except for their line endings. Its `id` and `retry` lines
//!    are not, because the proxy itself uses them to resume. Comments and unknown fields are removed.
//! 3. It is up to the caller to limit the length of lines and events. [`Reader::needed_capacity`] returns the capacity needed
//!    for the next bytes, and [`Reader::take`] can take the lines read so far at any time.

use std::{mem, time::Duration};

use bytes::{Buf as _, Bytes};
use memchr::memchr2;

use super::event::ID_CAPACITY;
use crate::message::Scanner;

/// Maximum length of an event id, in bytes. Longer ids are ignored.
///
/// This bounds both the header that the proxy sends to resume and the memory used by a stream's parser, which holds up to three
/// ids.
pub(super) const MAX_ID: usize = 512;

/// Maximum length of a `retry` value, in bytes.
const MAX_RETRY: usize = 16;

pub(super) const BOM: &[u8] = b"\xef\xbb\xbf";

/// The parser for one stream.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// The lines to forward from the current event, as far as they have been read.
    lines: Vec<u8>,
    line: Line,
    /// Whether the last byte was a carriage return.
    ///
    /// If so, a line feed right after it is part of the same line ending.
    is_after_cr: bool,
    /// How many bytes of the byte order mark have been read.
    ///
    /// Set to `BOM.len()` as soon as the mark can no longer follow.
    bom_read: usize,
    has_data: bool,
    /// Scans the current event's data if its lines are being taken before it ends.
    scan: Option<Box<Scanner>>,
    /// The value of the current `id` or `retry` line.
    value: Vec<u8>,
    id: Option<Box<[u8]>>,
    /// The latest id from a complete event.
    last_id: Option<Box<[u8]>>,
    retry: Option<Duration>,
}

/// The state of the current line.
#[derive(Debug, Clone, Copy, Default)]
enum Line {
    #[default]
    Start,
    /// This many bytes of the field's name have been read.
    Name(Field, usize),
    /// The colon has been read, but nothing after it.
    Space(Field),
    Value(Field),
    /// The rest of the line is ignored.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Data,
    Event,
    Id,
    Retry,
}

/// Why [`Reader::read`] returned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// All bytes have been read.
    Bytes,
    /// An event with data has ended. Call [`Reader::take`] to get its lines.
    Event,
}

// === impl Reader ===

impl Reader {
    /// Reads up to the end of the next event with data, and advances `bytes` to what follows.
    pub(crate) fn read(&mut self, bytes: &mut &[u8]) -> Read {
        while let Some((first, rest)) = bytes.split_first() {
            if self.skip_bom(*first) || (mem::take(&mut self.is_after_cr) && *first == b'\n') {
                *bytes = rest;
                continue;
            }
            let end = memchr2(b'\n', b'\r', bytes);
            let text = match end.and_then(|end| bytes.split_at_checked(end)) {
                Some((text, [end, rest @ ..])) => {
                    self.is_after_cr = *end == b'\r';
                    *bytes = rest;
                    text
                }
                _ => {
                    self.add_text(mem::take(bytes));
                    break;
                }
            };
            self.add_text(text);
            if self.end_line() {
                return Read::Event;
            }
        }
        Read::Bytes
    }

    /// Takes the lines to forward from the current event, as far as they have been read.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        mem::take(&mut self.lines)
    }

    /// Starts scanning the current event. Needed if its lines are taken before it ends.
    pub(crate) fn begin_scan(&mut self) {
        self.scan = Some(Box::new(scan_lines(&self.lines)));
    }

    /// Returns the current event's scan, or `None` if none has been started.
    pub(crate) fn scan(&self) -> Option<&Scanner> {
        self.scan.as_deref()
    }

    /// Ends the current event's scan and returns it, or an empty scan if none was started.
    pub(crate) fn end_scan(&mut self) -> Scanner {
        self.scan.take().map(|scan| *scan).unwrap_or_default()
    }

    /// Returns the capacity that the lines need in order to hold `bytes` more bytes.
    ///
    /// This is the current capacity if it is enough. Otherwise, it is twice the current capacity but at most `max`, or more
    /// than that if the bytes don't fit otherwise.
    pub(crate) fn needed_capacity(&self, bytes: usize, max: usize) -> usize {
        // A field's name is only added to the lines once it has been read in full.
        let held_back = match self.line {
            Line::Name(_, matched) => matched,
            _ => 0,
        };
        let length = self.lines.len() + held_back + bytes + ID_CAPACITY;
        if length <= self.lines.capacity() {
            self.lines.capacity()
        } else {
            length.max(max.min(2 * self.lines.capacity()))
        }
    }

    /// Makes sure that the lines have a capacity of at least `needed` bytes.
    pub(crate) fn reserve(&mut self, needed: usize) {
        self.lines
            .reserve_exact(needed.saturating_sub(self.lines.len()));
    }

    /// Returns the id from which the server can resume.
    ///
    /// Returns `None` if there has been no complete event with an id, or if the latest id is empty.
    pub(crate) fn last_id(&self) -> Option<&[u8]> {
        self.last_id.as_deref()
    }

    /// Returns the latest reconnect delay sent by the server, if any.
    pub(crate) fn retry(&self) -> Option<Duration> {
        self.retry
    }

    /// Prepares for the next body of the same stream, dropping any incomplete event.
    pub(crate) fn start_next_body(&mut self) {
        *self = Self {
            last_id: self.last_id.take(),
            retry: self.retry,
            ..Self::default()
        };
    }

    /// Skips the byte if it is part of a byte order mark. Returns `false` if it is not.
    fn skip_bom(&mut self, byte: u8) -> bool {
        if BOM.get(self.bom_read) == Some(&byte) {
            self.bom_read += 1;
            return true;
        }
        if (1..BOM.len()).contains(&self.bom_read) {
            // A line that starts with only part of the mark is not a field.
            self.line = Line::Other;
        }
        self.bom_read = BOM.len();
        false
    }

    /// Adds text from the current line, excluding the line ending.
    fn add_text(&mut self, mut text: &[u8]) {
        if let Line::Start = self.line {
            self.line = match text.first() {
                None => return,
                Some(b'd') => Line::Name(Field::Data, 0),
                Some(b'e') => Line::Name(Field::Event, 0),
                Some(b'i') => Line::Name(Field::Id, 0),
                Some(b'r') => Line::Name(Field::Retry, 0),
                Some(_) => Line::Other,
            };
        }
        if let Line::Name(field, matched) = self.line {
            let rest_of_name = field.name().get(matched..).unwrap_or_default();
            match text.strip_prefix(rest_of_name) {
                Some(rest) => text = rest,
                None if rest_of_name.starts_with(text) => {
                    self.line = Line::Name(field, matched + text.len());
                    return;
                }
                None => {
                    self.line = Line::Other;
                    return;
                }
            }
            self.forward(field, field.name());
            self.line = Line::Space(field);
        }
        if let (Line::Space(field), Some(first)) = (self.line, text.first()) {
            if *first == b' ' {
                self.forward(field, b" ");
                text = text.get(1..).unwrap_or_default();
            }
            self.line = Line::Value(field);
        }
        if let Line::Value(field) = self.line {
            self.add_value(field, text);
        }
    }

    /// Adds text to the lines to forward, if the field is `data` or `event`.
    fn forward(&mut self, field: Field, text: &[u8]) {
        if let Field::Data | Field::Event = field {
            self.lines.extend_from_slice(text);
        }
    }

    fn add_value(&mut self, field: Field, text: &[u8]) {
        self.forward(field, text);
        match field {
            Field::Data => {
                self.has_data |= !text.is_empty();
                self.continue_scan(text);
            }
            Field::Event => {}
            Field::Id | Field::Retry => {
                // Keep one byte beyond the limit, to detect an overlong value.
                let max = field.max() + 1 - self.value.len().min(field.max() + 1);
                let text = text.get(..max).unwrap_or(text);
                self.value.reserve_exact(text.len());
                self.value.extend_from_slice(text);
            }
        }
    }

    fn continue_scan(&mut self, text: &[u8]) {
        if let Some(scan) = &mut self.scan {
            scan.read(text);
        }
    }

    /// Ends the current line. Returns `true` if this also ends an event with data.
    fn end_line(&mut self) -> bool {
        match mem::take(&mut self.line) {
            Line::Start => return self.end_event(),
            // A field's name without a colon is a field with an empty value.
            Line::Name(field, matched) if matched + 1 == field.name().len() => {
                self.forward(field, field.name().get(..matched).unwrap_or_default());
                self.end_value(field);
            }
            Line::Space(field) | Line::Value(field) => self.end_value(field),
            Line::Name(..) | Line::Other => {}
        }
        false
    }

    /// Ends a line's value, ignoring an invalid or overlong `id` or `retry`.
    fn end_value(&mut self, field: Field) {
        self.forward(field, b"\n");
        let value = mem::take(&mut self.value);
        let text = Some(value).filter(|value| value.len() <= field.max());
        match field {
            Field::Data => self.continue_scan(b"\n"),
            Field::Event => {}
            // Ignore an id that contains a NUL, as the standard requires.
            Field::Id => {
                let id = text.filter(|id| !id.contains(&0)).map(Vec::into);
                self.id = id.or(self.id.take());
            }
            Field::Retry => {
                let digits = text
                    .filter(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit));
                let number = digits.and_then(|digits| str::from_utf8(&digits).ok()?.parse().ok());
                self.retry = number.map(Duration::from_millis).or(self.retry);
            }
        }
    }

    /// Ends the current event. If it has no data, drops its lines and returns `false`.
    fn end_event(&mut self) -> bool {
        if let Some(id) = self.id.take() {
            self.last_id = Some(id).filter(|id| !id.is_empty());
        }
        if !mem::take(&mut self.has_data) {
            self.lines.clear();
            return false;
        }
        true
    }
}

/// Skips a byte order mark at the start of a JSON body, as clients do.
///
/// `mark` is the part of the mark that may still follow.
pub(super) fn skip_bom(mark: &mut &[u8], bytes: &mut Bytes) {
    while let (Some((first, rest)), Some(byte)) = (mark.split_first(), bytes.first()) {
        if first == byte {
            bytes.advance(1);
            *mark = rest;
        } else {
            *mark = &[];
        }
    }
}

// === impl Field ===

impl Field {
    /// Returns the field's name, with the colon.
    fn name(self) -> &'static [u8] {
        match self {
            Self::Data => b"data:",
            Self::Event => b"event:",
            Self::Id => b"id:",
            Self::Retry => b"retry:",
        }
    }

    fn max(self) -> usize {
        match self {
            Self::Retry => MAX_RETRY,
            _ => MAX_ID,
        }
    }
}

/// Returns the values of an event's data lines.
pub(crate) fn data(lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    lines.split(|byte| *byte == b'\n').filter_map(data_value)
}

/// Scans the message in these lines, which may be incomplete.
pub(crate) fn scan_lines(lines: &[u8]) -> Scanner {
    let mut scan = Scanner::default();
    let lines = lines.split_inclusive(|byte| *byte == b'\n');
    lines
        .filter_map(data_value)
        .for_each(|data| scan.read(data));
    scan
}

fn data_value(line: &[u8]) -> Option<&[u8]> {
    let data = line.strip_prefix(b"data:")?;
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::IdKey;

    /// Returns the lines of each event in a body split into frames of `size` bytes.
    fn events(body: &[u8], size: usize) -> (Vec<String>, Reader) {
        let mut reader = Reader::default();
        let mut events = Vec::new();
        for mut frame in body.chunks(size) {
            while !frame.is_empty() {
                if reader.read(&mut frame) == Read::Event {
                    events.push(String::from_utf8(reader.take()).unwrap());
                }
            }
        }
        (events, reader)
    }

    /// Like [`events`], but also checks that the result does not depend on the frame size.
    fn read(body: &str) -> (Vec<String>, Reader) {
        let whole = events(body.as_bytes(), usize::MAX);
        for size in 1..12 {
            let cut = events(body.as_bytes(), size);
            assert_eq!(cut.0, whole.0, "{body:?} by {size}");
            assert_eq!(cut.1.last_id(), whole.1.last_id(), "{body:?} by {size}");
            assert_eq!(cut.1.retry(), whole.1.retry(), "{body:?} by {size}");
        }
        whole
    }

    #[test]
    fn the_type_and_the_data_of_an_event_are_forwarded() {
        for (body, expected) in [
            ("data: 1\n\n", "data: 1\n"),
            ("data:1\r\n\r\n", "data:1\n"),
            ("data:  1\r\r", "data:  1\n"),
            (
                ": c\nid: 7\nretry: 3\nevent:message\nx: y\ndata: 1\n\n",
                "event:message\ndata: 1\n",
            ),
            ("data: {\ndata:}\ndata\n\n", "data: {\ndata:}\ndata\n"),
            ("\u{feff}data: 1\n\n", "data: 1\n"),
            ("data:\ndata: 1\n\n", "data:\ndata: 1\n"),
            (
                "dat\ndatab: 2\nda: 3\ndata: \u{feff}1\n\n",
                "data: \u{feff}1\n",
            ),
        ] {
            assert_eq!(read(body).0, [expected], "{body:?}");
        }
    }

    #[test]
    fn an_event_without_data_is_dropped() {
        for body in [
            ":\n\n",
            "\n\n\n",
            "data\n\n",
            "data: \ndata:\n\n",
            "event: a\n\n",
            " data: 1\n\n",
            "\u{feff}\u{feff}data: 1\n\n",
            "\u{feff}",
        ] {
            assert_eq!(read(body).0, [""; 0], "{body:?}");
        }
        assert_eq!(
            read("event: a\n\ndata: 1\n\n").0,
            ["data: 1\n"],
            "the type of an event without data is dropped"
        );
        assert_eq!(read("data: 1\n").0, [""; 0], "the event has not ended");
    }

    #[test]
    fn the_last_id_and_retry_are_taken_from_events_that_have_ended() {
        for (body, id, retry) in [
            ("id: a\n\nid: b\ndata: 1\n", Some("a"), None),
            ("id: a\nid: b\nretry: 5\n\n", Some("b"), Some(5)),
            ("id: a\n\nid\n\n", None, None),
            ("id: a\n\nid: b\0\n\n", Some("a"), None),
            ("retry: 1\nretry: x\nretry:\nretry: -1\n\n", None, Some(1)),
            ("retry: 99999999999999999999\n\n", None, None),
        ] {
            let reader = read(body).1;
            assert_eq!(reader.last_id(), id.map(str::as_bytes), "{body:?}");
            assert_eq!(reader.retry(), retry.map(Duration::from_millis), "{body:?}");
        }
    }

    #[test]
    fn an_id_that_is_too_long_for_a_header_is_ignored() {
        let fits = "i".repeat(MAX_ID);
        let body = format!("id: {fits}\n\nid: {fits}i\n\n");
        assert_eq!(read(&body).1.last_id(), Some(fits.as_bytes()));
    }

    #[test]
    fn lines_that_are_not_forwarded_take_no_memory() {
        for start in [":", "id: ", "retry: ", "x: ", ""] {
            let mut reader = Reader::default();
            let mut bytes = start.as_bytes();
            reader.read(&mut bytes);
            for _ in 0..1_000 {
                let mut bytes: &[u8] = &[b'x'; 1_000];
                reader.read(&mut bytes);
            }
            assert!(reader.lines.capacity() == 0 && reader.value.capacity() <= MAX_ID + 1);
        }
    }

    #[test]
    fn lines_taken_early_belong_to_the_same_event() {
        let mut reader = Reader::default();
        let (mut taken, mut ends) = (Vec::new(), Vec::new());
        for mut piece in [b"data: on" as &[u8], b"e\ndata: ", b"two\n", b"\n"] {
            ends.push(reader.read(&mut piece));
            taken.extend(reader.take());
        }
        assert_eq!(ends, [Read::Bytes, Read::Bytes, Read::Bytes, Read::Event]);
        assert_eq!(taken, b"data: one\ndata: two\n");
    }

    #[test]
    fn no_more_is_allocated_than_the_next_bytes_need() {
        for line in ["data\n", "data:\n", "data:x\n", "event\n", "x\n", "dat"] {
            let body = line.repeat(409);
            for size in 1..7 {
                let mut reader = Reader::default();
                for mut step in body.as_bytes().chunks(size) {
                    let needed = reader.needed_capacity(step.len(), usize::MAX);
                    reader.reserve(needed);
                    assert_eq!(reader.read(&mut step), Read::Bytes);
                    let allocated = reader.lines.capacity();
                    assert!(allocated <= needed, "{line:?}: {allocated} of {needed}");
                }
            }
        }
    }

    #[test]
    fn an_event_that_is_taken_in_parts_is_read_like_a_whole_one() {
        let body = "event: message\ndata: {\"jsonrpc\":\ndata:\"2.0\",\ndata\ndata: \"id\": 7,\ndata:  \"result\": {\"id\": 8}}\n\n";
        let whole = events(body.as_bytes(), usize::MAX).0;
        let call = IdKey::of("7");
        assert_eq!(scan_lines(whole[0].as_bytes()).answers(), call);
        for size in 1..40 {
            for started in 0..body.len() {
                let mut reader = Reader::default();
                let mut taken = Vec::new();
                for (at, mut piece) in body.as_bytes().chunks(size).enumerate() {
                    if at * size >= started {
                        if reader.scan().is_none() {
                            reader.begin_scan();
                        }
                        taken.extend(reader.take());
                    }
                    reader.read(&mut piece);
                }
                taken.extend(reader.take());
                assert_eq!(String::from_utf8(taken).unwrap(), whole[0]);
                if reader.scan().is_some() {
                    assert_eq!(reader.end_scan().answers(), call, "{size} {started}");
                }
            }
        }
    }
}
