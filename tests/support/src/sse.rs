//! An incremental reader of server-sent events (WHATWG HTML, section 9.2.6).
//!
//! It differs from a browser's reader in two ways, so that tests see everything that was sent: an event without data
//! counts (rmcp's priming event is one), and comments are items, too.

use std::{collections::VecDeque, mem};

use serde_json::Value;

/// An event.
///
/// Fields that were not sent are `None`, but `data` is empty whether it was sent empty or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// The event id, which a client sends in `Last-Event-ID`.
    pub id: Option<String>,
    /// The data lines, joined by line feeds.
    pub data: String,
    /// The reconnection time in milliseconds.
    pub retry: Option<u64>,
    /// The event type.
    pub event: Option<String>,
}

/// One item from a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SseItem {
    /// An event, which ended with a blank line.
    Event(SseEvent),
    /// A comment line without its colon, as in keep-alives.
    Comment(String),
}

/// Takes bytes as they arrive and returns complete items.
#[derive(Debug, Default)]
pub struct SseReader {
    line: Vec<u8>,
    /// Whether the last line ended in a carriage return, so that a line feed belongs to it.
    is_after_return: bool,
    event: Option<SseEvent>,
    items: VecDeque<SseItem>,
}

// === impl SseEvent ===

impl SseEvent {
    /// Returns the JSON-RPC message in the data.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).expect("the data is JSON")
    }

    /// Returns `true` if the event has no message, just an id or a retry.
    pub fn is_priming(&self) -> bool {
        self.data.is_empty()
    }

    /// Returns `true` if the message is the response to a request.
    pub fn is_answer(&self) -> bool {
        !self.is_priming() && self.json().get("method").is_none()
    }

    fn set(&mut self, field: &str, value: &str) {
        match field {
            "id" => self.id = Some(value.to_owned()),
            "event" => self.event = Some(value.to_owned()),
            "retry" => self.retry = Some(value.parse().expect("retry is a number")),
            "data" => {
                self.data.push_str(value);
                self.data.push('\n');
            }
            _ => {}
        }
    }
}

// === impl SseReader ===

impl SseReader {
    /// Takes the next bytes of the stream, which may be split at any point.
    pub fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let is_second_half = byte == b'\n' && mem::take(&mut self.is_after_return);
            match byte {
                _ if is_second_half => {}
                b'\r' | b'\n' => self.end_line(),
                _ => self.line.push(byte),
            }
            self.is_after_return = byte == b'\r';
        }
    }

    /// Removes the next complete item and returns it, or `None` if there is none yet.
    pub fn pop(&mut self) -> Option<SseItem> {
        self.items.pop_front()
    }

    fn end_line(&mut self) {
        let line = String::from_utf8(mem::take(&mut self.line)).expect("an event stream is UTF-8");
        if line.is_empty() {
            self.end_event();
        } else if let Some(comment) = line.strip_prefix(':') {
            self.items.push_back(SseItem::Comment(comment.to_owned()));
        } else {
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            self.event.get_or_insert_default().set(field, value);
        }
    }

    fn end_event(&mut self) {
        if let Some(mut event) = self.event.take() {
            // Each data line adds a line feed, of which the last is not data.
            event.data.pop();
            self.items.push_back(SseItem::Event(event));
        }
    }
}
