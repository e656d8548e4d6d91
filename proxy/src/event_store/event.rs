//! Events and their ids.
//!
//! An event id has the form `mcp-<server>-<stream>.<seq>`:
//!
//! 1. `server` identifies the server, and survives restarts of the proxy. That way, the proxy recognises ids from before a
//!    restart and refuses them. If it forwarded such an id, a server that ignores unknown ids would answer with its standalone
//!    stream.
//! 2. `stream` is 128 random bits, so the ids of one stream don't reveal the ids of another.
//! 3. `seq` is the event's number in the stream.

use std::{fmt, time::Duration};

use bytes::Bytes;

use super::budget::Reservation;
use crate::message::{IdKey, Kind, Message, Scanner, batch};

/// An event without its id.
#[derive(Debug)]
pub struct Event {
    /// The lines, including their line feeds, but not the blank line that ends the event.
    pub(super) lines: Vec<u8>,
    pub(super) weight: Weight,
    /// Covers the lines. A stream's first event and its final error are covered by the stream's own reservation instead.
    pub(super) reservation: Option<Reservation>,
}

/// An event's bytes and their reservation, both freed with the last reference to the bytes.
struct OwnedLines {
    bytes: Vec<u8>,
    _reservation: Reservation,
}

/// An event's priority when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Progress or a log message. These are dropped first, oldest first, and a comment reports how many.
    Droppable,
    /// Any other message, even if it can't be parsed. It must reach the client.
    Kept,
    /// A request from the server, which is waiting for the client to answer. It must also reach the client.
    Request,
    /// The answer to the call, which completes it. It must also reach the client.
    Answer,
}

/// The prefix shared by all of an event store's ids.
#[derive(Debug, Clone)]
pub(crate) struct Origin(Box<str>);

/// The random bits that identify a stream in its event ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StreamName(u128);

/// What an id with an event store's prefix refers to: a stream and an event's number.
///
/// `None` if no store could have issued the id.
pub(crate) type EventId = Option<(StreamName, u64)>;

// === impl Event ===

impl Event {
    /// Creates an event from a server's message.
    ///
    /// `json` is the complete message. `call` is the id of the stream's call, or `None` for a standalone stream.
    ///
    /// ```
    /// use mcp_cancel_proxy::{event_store::{Event, Weight}, message::IdKey};
    ///
    /// let call = IdKey::of("7").unwrap();
    /// let weight = |json: &str| Event::message(json.as_bytes(), Some(&call)).weight();
    /// assert_eq!(weight(r#"{"method":"notifications/progress"}"#), Weight::Droppable);
    /// assert_eq!(weight(r#"{"id":1,"method":"roots/list"}"#), Weight::Request);
    /// assert_eq!(weight(r#"{"id":7,"result":{}}"#), Weight::Answer);
    /// ```
    pub fn message(json: &[u8], call: Option<&IdKey>) -> Self {
        let weight = Weight::of(json, call);
        Self::from_lines(data_lines(json), weight)
    }

    /// Creates an event from lines, each terminated by a line feed.
    pub(crate) fn from_lines(lines: Vec<u8>, weight: Weight) -> Self {
        Self {
            lines,
            weight,
            reservation: None,
        }
    }

    /// Sets the reservation that covers the lines.
    pub(crate) fn with_reservation(mut self, reservation: Reservation) -> Self {
        self.reservation = Some(reservation);
        self
    }

    /// Creates an event without a message, to give the client an id to resume from.
    ///
    /// It also sets the client's reconnect delay.
    pub(crate) fn priming(retry: Duration) -> Self {
        let lines = format!("retry: {}\ndata:\n", retry.as_millis());
        Self::from_lines(lines.into_bytes(), Weight::Kept)
    }

    /// Returns the event's priority when there is no room.
    pub fn weight(&self) -> Weight {
        self.weight
    }

    /// Returns the lines. Their reservation is released along with the last reference to them.
    pub(super) fn into_bytes(self) -> Bytes {
        let bytes = self.lines;
        match self.reservation {
            Some(_reservation) => Bytes::from_owner(OwnedLines {
                bytes,
                _reservation,
            }),
            None => bytes.into(),
        }
    }
}

/// Spare capacity that lets the `id` line be appended without copying the event.
pub(super) const ID_CAPACITY: usize = 72;

/// Splits a message into `data` lines. In JSON, a line break is just white space between tokens.
fn data_lines(json: &[u8]) -> Vec<u8> {
    const FRAME_OVERHEAD: usize = "data: \n".len();
    let mut lines = Vec::with_capacity(json.len() + FRAME_OVERHEAD + ID_CAPACITY);
    for line in json.split(|byte| matches!(byte, b'\n' | b'\r')) {
        if !line.is_empty() {
            lines.extend_from_slice(b"data: ");
            lines.extend_from_slice(line);
            lines.push(b'\n');
        }
    }
    lines
}

/// Creates an event that answers a call with a JSON-RPC error. `id` is the call's id, as JSON text.
pub(crate) fn error(id: &str, code: i32, message: &str) -> Event {
    let message = serde_json::Value::from(message);
    error_from_json(id, &format!(r#"{{"code":{code},"message":{message}}}"#))
}

/// Like [`error`], but takes the complete error object as JSON text.
pub(crate) fn error_from_json(id: &str, error: &str) -> Event {
    let json = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    Event::from_lines(data_lines(json.as_bytes()), Weight::Answer)
}

// === impl OwnedLines ===

impl AsRef<[u8]> for OwnedLines {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

// === impl Weight ===

impl Weight {
    /// Returns a message's weight on the stream of `call`.
    ///
    /// An unparsable message is [`Kept`](Self::Kept), unless a scan finds that it may be the answer. It is then treated as the
    /// answer, because the client may be able to parse it, and no other answer will follow. A batch is treated as the answer if
    /// one of its messages is the answer.
    pub fn of(json: &[u8], call: Option<&IdKey>) -> Self {
        let Some(messages) = batch(json) else {
            return Self::of_message(json, call);
        };
        let weights: Vec<Self> = messages
            .into_iter()
            .map(|message| Self::of_message(message, call))
            .collect();
        let mut by_priority = [Self::Answer, Self::Request].into_iter();
        by_priority
            .find(|weight| weights.contains(weight))
            .unwrap_or(Self::Kept)
    }

    fn of_message(json: &[u8], call: Option<&IdKey>) -> Self {
        let answered = match Message::read(json) {
            Some(message) if message.is_droppable() => return Self::Droppable,
            Some(message) if message.kind == Kind::Request => return Self::Request,
            Some(message) => message.answered_id(),
            None if call.is_some() => Scanner::of(json).answers(),
            None => None,
        };
        Self::of_answer(answered, call)
    }

    /// Returns a message's weight based on a scan of it.
    pub(super) fn from_scan(scanner: Scanner, call: Option<&IdKey>) -> Self {
        if scanner.is_droppable() {
            Self::Droppable
        } else if scanner.is_request() {
            Self::Request
        } else {
            Self::of_answer(scanner.answers(), call)
        }
    }

    /// Returns the weight of a message that answers the request `answered`, if any.
    ///
    /// Since a stream has only one call, it is enough for the id to [resemble](IdKey::resembles) the call's id.
    fn of_answer(answered: Option<IdKey>, call: Option<&IdKey>) -> Self {
        match answered.zip(call) {
            Some((answered, call)) if answered.resembles(call) => Self::Answer,
            _ => Self::Kept,
        }
    }
}

// === impl StreamName ===

impl StreamName {
    const DIGITS: usize = 32;

    /// Generates a name, or returns `None` if the system's random number generator fails.
    pub(crate) fn random() -> Option<Self> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits).ok()?;
        Some(Self(u128::from_ne_bytes(bits)))
    }

    /// Parses a name. Upper-case digits are rejected, because no store produces them.
    fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_name = text.len() == Self::DIGITS && text.bytes().all(is_digit);
        is_name.then(|| u128::from_str_radix(text, 16).ok().map(Self))?
    }
}

/// Hides the random bits, which are a credential.
impl fmt::Debug for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamName")
    }
}

// === impl Origin ===

impl Origin {
    /// Returns the origin for a server. The server's name is hashed (FNV-1a), but can still be guessed from the hash.
    pub(crate) fn of(server: &str) -> Self {
        let add = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let hash = server.bytes().fold(0x811c_9dc5, add);
        Self(format!("mcp-{hash:08x}-").into())
    }

    /// Returns the prefix of a stream's event ids.
    pub(crate) fn prefix(&self, stream: StreamName) -> Box<str> {
        format!("{}{:032x}.", self.0, stream.0).into()
    }

    /// Parses an event id. Returns `None` if it has a different origin.
    pub(crate) fn parse(&self, id: &str) -> Option<EventId> {
        let rest = id.strip_prefix(&*self.0)?;
        Some(rest.split_once('.').and_then(|(stream, seq)| {
            let stream = StreamName::parse(stream)?;
            Some((stream, parse_seq(seq)?))
        }))
    }
}

/// Parses an event number. Signs and leading zeros are rejected, because no store produces them.
fn parse_seq(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    let first = text.as_bytes().first()?;
    (first.is_ascii_digit() && (*first != b'0' || text.len() == 1)).then_some(number)
}
