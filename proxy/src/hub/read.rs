//! The events of a server's stream, read for what is handed on of them.
//!
//! 1. Events are those of the standard (WHATWG HTML, section 9.2.6): any of three line ends, a byte order mark at the
//!    start, comments, several data lines. How the body is cut into frames changes nothing.
//! 2. Of an event its `event` and `data` lines are handed on, with their text as it came. Its `id` and its `retry` are the
//!    server's word to whoever reads it, which is the hub. Comments and fields that the standard does not know go.
//! 3. What a line or an event may take is for the caller to say: it is told what the next bytes need, and takes what has
//!    come whenever it likes.

use std::{mem, time::Duration};

use memchr::memchr2;

use super::event::ROOM_FOR_ID;

/// How long an id may be to be remembered: 4 KiB. It is sent back in a header.
const MAX_ID: usize = 4 * 1024;

/// How long a `retry` may be.
const MAX_RETRY: usize = 16;

const MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads one stream.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// The lines of the event so far that are handed on.
    lines: Vec<u8>,
    line: Line,
    after_return: bool,
    /// How much of the byte order mark has come; more than that, once it cannot come any more.
    marked: usize,
    has_data: bool,
    /// The value of an `id` or a `retry` line.
    value: Vec<u8>,
    id: Option<Vec<u8>>,
    /// The id of the last event that ended.
    last_id: Option<Vec<u8>>,
    retry: Option<Duration>,
}

/// How far the current line has come.
#[derive(Debug, Clone, Copy, Default)]
enum Line {
    #[default]
    Start,
    /// So many bytes of this name have come.
    Name(Field, usize),
    /// The colon has come, and nothing after it.
    Space(Field),
    Value(Field),
    /// It is of no interest.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Data,
    Event,
    Id,
    Retry,
}

/// What has come to its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// The bytes.
    Bytes,
    /// An event with data. [`Reader::take`] has its lines.
    Event,
}

// === impl Reader ===

impl Reader {
    /// Reads on, up to the end of the next event that has data. `bytes` is what is left then.
    pub(crate) fn read(&mut self, bytes: &mut &[u8]) -> Read {
        while let Some((first, rest)) = bytes.split_first() {
            if self.skip_mark(*first) || (mem::take(&mut self.after_return) && *first == b'\n') {
                *bytes = rest;
                continue;
            }
            let end = memchr2(b'\n', b'\r', bytes);
            let text = match end.and_then(|end| bytes.split_at_checked(end)) {
                Some((text, [end, rest @ ..])) => {
                    self.after_return = *end == b'\r';
                    *bytes = rest;
                    text
                }
                _ => {
                    self.text(mem::take(bytes));
                    break;
                }
            };
            self.text(text);
            if self.end_line() {
                return Read::Event;
            }
        }
        Read::Bytes
    }

    /// Takes the lines of the event so far that are handed on.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        mem::take(&mut self.lines)
    }

    /// How much is allocated for these lines once `bytes` more have come. It doubles, but not past `most`.
    pub(crate) fn needs(&self, bytes: usize, most: usize) -> usize {
        let length = self.lines.len() + bytes + ROOM_FOR_ID;
        match length <= self.lines.capacity() {
            true => self.lines.capacity(),
            false => length.max(most.min(2 * self.lines.capacity())),
        }
    }

    /// Allocates that.
    pub(crate) fn reserve(&mut self, needed: usize) {
        self.lines
            .reserve_exact(needed.saturating_sub(self.lines.len()));
    }

    /// The id from which the server would go on, if it gave one that can be sent back.
    pub(crate) fn last_id(&self) -> Option<&[u8]> {
        self.last_id.as_deref()
    }

    /// How long the server asked to be left alone first.
    pub(crate) fn retry(&self) -> Option<Duration> {
        self.retry
    }

    /// Begins another body of the same stream. What has come of an event is dropped.
    pub(crate) fn begin_again(&mut self) {
        *self = Self {
            last_id: self.last_id.take(),
            retry: self.retry,
            ..Self::default()
        };
    }

    /// Whether this byte is one of the mark.
    fn skip_mark(&mut self, byte: u8) -> bool {
        if MARK.get(self.marked) == Some(&byte) {
            self.marked += 1;
            return true;
        }
        if (1..MARK.len()).contains(&self.marked) {
            // A line that begins with a part of the mark is no field.
            self.line = Line::Other;
        }
        self.marked = MARK.len();
        false
    }

    fn text(&mut self, mut text: &[u8]) {
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
        if let Line::Name(field, came) = self.line {
            let left = field.name().get(came..).unwrap_or_default();
            match text.strip_prefix(left) {
                Some(rest) => text = rest,
                None if left.starts_with(text) => {
                    self.line = Line::Name(field, came + text.len());
                    return;
                }
                None => {
                    self.line = Line::Other;
                    return;
                }
            }
            self.begin_value(field);
            self.line = Line::Space(field);
        }
        if let (Line::Space(field), Some(first)) = (self.line, text.first()) {
            if *first == b' ' {
                text = text.get(1..).unwrap_or_default();
            }
            self.line = Line::Value(field);
        }
        if let Line::Value(field) = self.line {
            self.value(field, text);
        }
    }

    fn begin_value(&mut self, field: Field) {
        if field.is_handed_on() {
            self.lines.extend_from_slice(field.name());
            self.lines.push(b' ');
        }
    }

    fn value(&mut self, field: Field, text: &[u8]) {
        match field {
            Field::Data => self.has_data |= !text.is_empty(),
            Field::Event => {}
            Field::Id | Field::Retry => {
                // One byte more than may be tells that it was too long.
                let most = field.most() + 1 - self.value.len().min(field.most() + 1);
                self.value
                    .extend_from_slice(text.get(..most).unwrap_or(text));
                return;
            }
        }
        self.lines.extend_from_slice(text);
    }

    /// Ends a line. `true` if that ends an event with data.
    fn end_line(&mut self) -> bool {
        match mem::take(&mut self.line) {
            Line::Start => return self.end_event(),
            Line::Name(field, came) if came + 1 == field.name().len() => {
                self.begin_value(field);
                self.end_value(field);
            }
            Line::Space(field) | Line::Value(field) => self.end_value(field),
            Line::Name(..) | Line::Other => {}
        }
        false
    }

    fn end_value(&mut self, field: Field) {
        if field.is_handed_on() {
            self.lines.push(b'\n');
            return;
        }
        let value = mem::take(&mut self.value);
        let text = Some(value).filter(|value| value.len() <= field.most());
        match field {
            // The standard says what a zero means.
            Field::Id => self.id = text.filter(|id| !id.contains(&0)).or(self.id.take()),
            _ => {
                let digits = text
                    .filter(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit));
                let number = digits.and_then(|digits| str::from_utf8(&digits).ok()?.parse().ok());
                self.retry = number.map(Duration::from_millis).or(self.retry);
            }
        }
    }

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

// === impl Field ===

impl Field {
    /// Its name and the colon.
    fn name(self) -> &'static [u8] {
        match self {
            Self::Data => b"data:",
            Self::Event => b"event:",
            Self::Id => b"id:",
            Self::Retry => b"retry:",
        }
    }

    fn is_handed_on(self) -> bool {
        matches!(self, Self::Data | Self::Event)
    }

    fn most(self) -> usize {
        match self {
            Self::Retry => MAX_RETRY,
            _ => MAX_ID,
        }
    }
}

/// The message in the lines of an event: their data, in one piece if it was on one line.
pub(crate) fn data(lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    lines
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.strip_prefix(b"data: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of every event, of a body in frames of so many bytes.
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

    /// The same of a body that reads so however it is cut.
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
    fn of_an_event_its_type_and_its_data_are_handed_on() {
        for (body, expected) in [
            ("data: 1\n\n", "data: 1\n"),
            ("data:1\r\n\r\n", "data: 1\n"),
            ("data:  1\r\r", "data:  1\n"),
            (
                ": c\nid: 7\nretry: 3\nevent:message\nx: y\ndata: 1\n\n",
                "event: message\ndata: 1\n",
            ),
            ("data: {\ndata:}\ndata\n\n", "data: {\ndata: }\ndata: \n"),
            ("\u{feff}data: 1\n\n", "data: 1\n"),
            ("data:\ndata: 1\n\n", "data: \ndata: 1\n"),
            (
                "dat\ndatab: 2\nda: 3\ndata: \u{feff}1\n\n",
                "data: \u{feff}1\n",
            ),
        ] {
            assert_eq!(read(body).0, [expected], "{body:?}");
        }
    }

    #[test]
    fn what_has_no_data_is_no_event() {
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
            "its type goes with it"
        );
        assert_eq!(read("data: 1\n").0, [""; 0], "it has not ended");
    }

    #[test]
    fn the_last_id_and_retry_are_those_of_events_that_have_ended() {
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
    fn an_id_that_no_header_takes_is_none() {
        let fits = "i".repeat(MAX_ID);
        let body = format!("id: {fits}\n\nid: {fits}i\n\n");
        assert_eq!(read(&body).1.last_id(), Some(fits.as_bytes()));
    }

    #[test]
    fn lines_that_are_not_handed_on_take_no_memory() {
        for start in [":", "id: ", "retry: ", "x: ", ""] {
            let mut reader = Reader::default();
            let mut bytes = start.as_bytes();
            reader.read(&mut bytes);
            for _ in 0..1_000 {
                let mut bytes: &[u8] = &[b'x'; 1_000];
                reader.read(&mut bytes);
            }
            assert!(reader.lines.capacity() == 0 && reader.value.capacity() <= 3 * MAX_ID);
        }
    }

    #[test]
    fn what_was_taken_early_is_a_part_of_the_same_event() {
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
    #[ignore = "a line without a space after its colon, or without a colon, is longer when it is handed on"]
    fn what_the_next_bytes_need_is_all_that_is_allocated() {
        let mut reader = Reader::default();
        let step = b"data\n".repeat(409);
        for _ in 0..100 {
            let needed = reader.needs(step.len(), usize::MAX);
            reader.reserve(needed);
            assert_eq!(reader.read(&mut &step[..]), Read::Bytes);
            assert!(
                reader.lines.capacity() <= needed,
                "{} of {needed}",
                reader.lines.capacity()
            );
        }
    }
}
