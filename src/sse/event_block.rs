//! The event being read, which consists of the lines since the last blank line.

use std::{borrow::Cow, mem, time::Duration};

use crate::envelope::{Answers, ParseFailure, answers};

/// Maximum size of an event's buffered data, the same as for a request body.
///
/// Data on a single line and within a single frame is not buffered, so it can be larger.
const MAX_DATA: usize = 4 * 1024 * 1024;

/// Maximum size of the value of an `id` or a `retry`.
///
/// A client sends an id back in a header, and by default hyper accepts less than this across all headers, so a client could not
/// resume after a longer id.
const MAX_VALUE: usize = 512 * 1024;

/// Maximum `retry`. An exchange cannot store a longer delay.
const MAX_RETRY: Duration = Duration::from_millis(i32::MAX as u64);

/// The parts of an event that matter to the calls on its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StreamEvent<'a> {
    /// The `id`, as sent. An empty id clears the client's last event id.
    pub(crate) id: Option<&'a [u8]>,
    /// The client's reconnect delay.
    pub(crate) retry: Option<Duration>,
    /// The request that the data answers.
    pub(crate) answers: Answers,
    /// Whether the data might be an answer to an unknown request.
    pub(crate) is_ambiguous: bool,
}

/// The event fields that matter to the layer.
#[derive(Clone, Copy)]
pub(super) enum EventField {
    Data,
    Id,
    Retry,
}

/// The lines of an incomplete event.
///
/// While a frame `'f` is being read, strings are borrowed from it where possible.
#[derive(Default)]
pub(super) struct EventBlock<'f> {
    /// The event's data lines, joined by line feeds.
    data: Option<Text<'f>>,
    id: Option<Cow<'f, [u8]>>,
    retry: Option<Duration>,
    /// The value of the `id` or `retry` being read. Empty during any other line.
    value: Text<'f>,
}

/// Text of limited length.
enum Text<'f> {
    Whole(Cow<'f, [u8]>),
    TooLong,
}

// === impl EventField ===

impl EventField {
    /// Returns the name, including its colon.
    pub(super) fn name(self) -> &'static [u8] {
        match self {
            Self::Data => b"data:",
            Self::Id => b"id:",
            Self::Retry => b"retry:",
        }
    }
}

// === impl EventBlock ===

impl<'f> EventBlock<'f> {
    /// Starts a line's value.
    pub(super) fn start(&mut self, field: EventField) {
        match (field, &mut self.data) {
            (EventField::Data, Some(data)) => data.push(b"\n", MAX_DATA),
            (EventField::Data, data) => *data = Some(Text::default()),
            (EventField::Id | EventField::Retry, _) => {}
        }
    }

    /// Appends to a line's value.
    pub(super) fn append(&mut self, field: EventField, piece: &'f [u8]) {
        match field {
            EventField::Data => self.data.get_or_insert_default().push(piece, MAX_DATA),
            EventField::Id | EventField::Retry => self.value.push(piece, MAX_VALUE),
        }
    }

    /// Ends a line's value.
    pub(super) fn end(&mut self, field: EventField) {
        match field {
            EventField::Data => {}
            EventField::Id => {
                if let Some(id) = self.take_value().filter(|id| !id.contains(&0)) {
                    self.id = Some(id);
                }
            }
            EventField::Retry => {
                let retry = self.take_value().and_then(|digits| milliseconds(&digits));
                self.retry = retry.or(self.retry);
            }
        }
    }

    /// Takes the value of an `id` or a `retry`, or returns `None` if it exceeds [`MAX_VALUE`].
    fn take_value(&mut self) -> Option<Cow<'f, [u8]>> {
        match mem::take(&mut self.value) {
            Text::Whole(value) if value.len() <= MAX_VALUE => Some(value),
            _ => None,
        }
    }

    /// Returns the ended block's event, or `None` if the block has none of the fields that matter.
    pub(super) fn event(&self) -> Option<StreamEvent<'_>> {
        if !self.has_event() {
            return None;
        }
        let (answers, is_ambiguous) = match &self.data {
            None => (Answers::Nothing, false),
            Some(Text::Whole(data)) => {
                let answers = answers(data);
                let is_ambiguous = match answers {
                    Answers::Nothing | Answers::One(_) => false,
                    Answers::Ambiguous(reason) => reason.is_ambiguous(data),
                };
                (answers, is_ambiguous)
            }
            Some(Text::TooLong) => (Answers::Ambiguous(ParseFailure::TooLarge), true),
        };
        Some(StreamEvent {
            id: self.id.as_deref(),
            retry: self.retry,
            answers,
            is_ambiguous,
        })
    }

    /// Copies anything borrowed from the frame into buffers.
    pub(super) fn into_owned(self) -> EventBlock<'static> {
        EventBlock {
            data: self.data.map(|data| data.into_owned(MAX_DATA)),
            id: self.id.map(|id| Cow::Owned(id.into_owned())),
            retry: self.retry,
            value: self.value.into_owned(MAX_VALUE),
        }
    }

    fn has_event(&self) -> bool {
        self.data.is_some() || self.id.is_some() || self.retry.is_some()
    }

    /// Returns `true` if no part of the event has been received yet.
    pub(super) fn is_empty(&self) -> bool {
        !self.has_event() && matches!(&self.value, Text::Whole(text) if text.is_empty())
    }

    /// Returns the number of allocated bytes.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        let buffer = |text: &Cow<'_, [u8]>| match text {
            Cow::Borrowed(_) => 0,
            Cow::Owned(buffer) => buffer.capacity(),
        };
        let text_buffer = |text: &Text<'_>| match text {
            Text::Whole(text) => buffer(text),
            Text::TooLong => 0,
        };
        self.data.as_ref().map_or(0, text_buffer)
            + self.id.as_ref().map_or(0, buffer)
            + text_buffer(&self.value)
    }
}

fn milliseconds(digits: &[u8]) -> Option<Duration> {
    if digits.is_empty() {
        return None;
    }
    let number = digits.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        Some(number.saturating_mul(10).saturating_add(digit))
    });
    Some(Duration::from_millis(number?).min(MAX_RETRY))
}

// === impl Text ===

impl<'f> Text<'f> {
    /// Appends a piece, or drops the buffer if it would exceed `limit`.
    fn push(&mut self, piece: &'f [u8], limit: usize) {
        match self {
            Self::Whole(text) if text.is_empty() => *text = Cow::Borrowed(piece),
            Self::Whole(text) if text.len() + piece.len() <= limit => {
                let text = text.to_mut();
                let length = text.len() + piece.len();
                if text.capacity() < length {
                    // Double the capacity, as a `Vec` does, but not beyond the limit.
                    let doubled = (2 * text.len()).clamp(length, limit);
                    text.reserve_exact(doubled - text.len());
                }
                text.extend_from_slice(piece);
            }
            Self::Whole(_) => *self = Self::TooLong,
            Self::TooLong => {}
        }
    }

    fn into_owned(self, limit: usize) -> Text<'static> {
        match self {
            Self::Whole(Cow::Owned(text)) => Text::Whole(Cow::Owned(text)),
            Self::Whole(Cow::Borrowed(text)) if text.len() <= limit => {
                Text::Whole(Cow::Owned(text.to_owned()))
            }
            Self::Whole(Cow::Borrowed(_)) | Self::TooLong => Text::TooLong,
        }
    }
}

impl Default for Text<'_> {
    fn default() -> Self {
        Self::Whole(Cow::default())
    }
}
