//! Events and their ids.
//!
//! An id is `mcp-<server>-<stream>.<seq>`:
//!
//! 1. `server` is the same for every start of a proxy in front of the same server. So the proxy recognises and refuses an id from
//!    before a restart. If it forwarded the id, a server that ignores unknown ids would answer with its standalone stream.
//! 2. `stream` has 128 random bits of its own. No id reveals those of another stream.

use std::{fmt, time::Duration};

use bytes::Bytes;

use super::budget::Reservation;
use crate::message::{IdKey, Kind, Message, Scanner, batch};

/// An event without its id.
#[derive(Debug)]
pub struct Event {
    /// The lines with their line feeds, without the blank line that ends the event.
    pub(super) lines: Vec<u8>,
    pub(super) weight: Weight,
    /// Covers the lines. The reservation of the stream covers its first event and its error.
    pub(super) reservation: Option<Reservation>,
}

/// The bytes of an event and their reservation.
///
/// The reservation is released with the last reference to the bytes.
struct OwnedLines {
    bytes: Vec<u8>,
    _reservation: Reservation,
}

/// What may happen to an event if there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Progress or a log message. The oldest of these are dropped first, and a comment reports their number.
    Droppable,
    /// Must reach the client: any other message, including one that cannot be read.
    Kept,
    /// A request from the server. It must reach the client as well, and the server waits for the answer.
    Request,
    /// The answer to the call. It must reach the client as well, and completes the call.
    Answer,
}

/// The prefix of the ids of an event store.
#[derive(Debug, Clone)]
pub(crate) struct Origin(Box<str>);

/// Identifies a stream in the ids of its events: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StreamName(u128);

/// The id of an event of this event store, or of an earlier one. `None` if it cannot be the id of an event.
pub(crate) type EventId = Option<(StreamName, u64)>;

// === impl Event ===

impl Event {
    /// Creates an event from a server's message.
    ///
    /// `json` is the whole message. `call` is the id of the stream's call, and `None` on a standalone stream.
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
        Self::of_lines(data_lines(json), weight)
    }

    /// Creates an event of these lines, each of which ends with a line feed.
    pub(crate) fn of_lines(lines: Vec<u8>, weight: Weight) -> Self {
        Self {
            lines,
            weight,
            reservation: None,
        }
    }

    /// Adds the reservation that covers its lines.
    pub(crate) fn with_reservation(mut self, reservation: Reservation) -> Self {
        self.reservation = Some(reservation);
        self
    }

    /// Creates the first event of a stream.
    ///
    /// It has no message, only an id to resume from and the reconnect delay.
    pub(crate) fn priming(retry: Duration) -> Self {
        let lines = format!("retry: {}\ndata:\n", retry.as_millis());
        Self::of_lines(lines.into_bytes(), Weight::Kept)
    }

    /// Returns what may happen to it if there is no room.
    pub fn weight(&self) -> Weight {
        self.weight
    }

    /// Returns the lines. Their reservation is released with the last reference to them.
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

/// Capacity for an id and its line, so that the id is appended without a copy of the event.
pub(super) const ROOM_FOR_ID: usize = 72;

/// Returns a message as `data` lines. Line breaks in JSON are white space between tokens.
fn data_lines(json: &[u8]) -> Vec<u8> {
    const FRAME_OVERHEAD: usize = "data: \n".len();
    let mut lines = Vec::with_capacity(json.len() + FRAME_OVERHEAD + ROOM_FOR_ID);
    for line in json.split(|byte| matches!(byte, b'\n' | b'\r')) {
        if !line.is_empty() {
            lines.extend_from_slice(b"data: ");
            lines.extend_from_slice(line);
            lines.push(b'\n');
        }
    }
    lines
}

/// Returns an event with a JSON-RPC error as the answer to a call, whose id is JSON text.
pub(crate) fn error(id: &str, code: i32, message: &str) -> Event {
    let message = serde_json::Value::from(message);
    error_from_json(id, &format!(r#"{{"code":{code},"message":{message}}}"#))
}

/// Returns an event with an error, given as JSON text, as the answer to a call.
pub(crate) fn error_from_json(id: &str, error: &str) -> Event {
    let json = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    Event::of_lines(data_lines(json.as_bytes()), Weight::Answer)
}

// === impl OwnedLines ===

impl AsRef<[u8]> for OwnedLines {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

// === impl Weight ===

impl Weight {
    /// Returns the weight of this message on this call's stream.
    ///
    /// A message that cannot be read is kept. It counts as the answer if it may be one, because the client may be able to
    /// read it, and no second answer follows. A batch is the answer if one of its messages is.
    pub fn of(json: &[u8], call: Option<&IdKey>) -> Self {
        let Some(messages) = batch(json) else {
            return Self::of_one(json, call);
        };
        let weights: Vec<Self> = messages
            .into_iter()
            .map(|message| Self::of_one(message, call))
            .collect();
        let mut heavy = [Self::Answer, Self::Request].into_iter();
        heavy
            .find(|weight| weights.contains(weight))
            .unwrap_or(Self::Kept)
    }

    fn of_one(json: &[u8], call: Option<&IdKey>) -> Self {
        let answered = match Message::read(json) {
            Some(message) if message.is_droppable() => return Self::Droppable,
            Some(message) if message.kind == Kind::Request => return Self::Request,
            Some(message) => message.answered_id(),
            None if call.is_some() => Scanner::of(json).answers(),
            None => None,
        };
        Self::of_answer(answered, call)
    }

    /// Returns the weight of a message that was scanned.
    pub(super) fn of_scanned(scanner: Scanner, call: Option<&IdKey>) -> Self {
        if scanner.is_droppable() {
            Self::Droppable
        } else if scanner.is_request() {
            Self::Request
        } else {
            Self::of_answer(scanner.answers(), call)
        }
    }

    /// Returns the weight of an answer to the request `answered`.
    ///
    /// A stream has only one call, so an id that merely [resembles](IdKey::resembles) that of the call is enough.
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

    /// Returns a new name, or `None` if the system's random number generator fails.
    pub(crate) fn random() -> Option<Self> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits).ok()?;
        Some(Self(u128::from_ne_bytes(bits)))
    }

    /// Parses a name. Returns `None` for upper-case digits, because the ids of a store have none.
    fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_name = text.len() == Self::DIGITS && text.bytes().all(is_digit);
        is_name.then(|| u128::from_str_radix(text, 16).ok().map(Self))?
    }
}

/// The bits are a credential, so they are not shown.
impl fmt::Debug for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamName")
    }
}

// === impl Origin ===

impl Origin {
    /// Returns the origin for the server with this name. The name is hashed (FNV-1a), and may be guessed from the hash.
    pub(crate) fn of(server: &str) -> Self {
        let add = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let hash = server.bytes().fold(0x811c_9dc5, add);
        Self(format!("mcp-{hash:08x}-").into())
    }

    /// Returns the prefix of the ids of a stream.
    pub(crate) fn prefix(&self, stream: StreamName) -> Box<str> {
        format!("{}{:032x}.", self.0, stream.0).into()
    }

    /// Parses an event id. Returns `None` if the id is of another origin.
    pub(crate) fn parse(&self, id: &str) -> Option<EventId> {
        let rest = id.strip_prefix(&*self.0)?;
        Some(rest.split_once('.').and_then(|(stream, seq)| {
            let stream = StreamName::parse(stream)?;
            Some((stream, parse_seq(seq)?))
        }))
    }
}

/// Parses the number of an event.
///
/// Returns `None` for a sign or leading zeros, because the ids of a store have neither.
fn parse_seq(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    let first = text.as_bytes().first()?;
    (first.is_ascii_digit() && (*first != b'0' || text.len() == 1)).then_some(number)
}
