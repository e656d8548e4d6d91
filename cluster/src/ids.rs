//! Identifiers for instances, sessions, calls, owners and events.
//!
//! 1. A session id is a secret, because it gives access to the session. The directory and the log therefore contain only its hash.
//! 2. Every identifier has exactly one text form, which is stored in the directory or sent to clients. Parsing it yields the same
//!    identifier.

use std::{
    array,
    error::Error,
    fmt::{self, Debug, Display, Formatter},
    hash::{BuildHasher, RandomState},
    process,
    str::FromStr,
    time::SystemTime,
};

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sha2::{Digest, Sha256};

pub(crate) use self::ownership::{Epoch, Owner, Ownership, Record, Tombstone};

mod ownership;

/// Maximum length of a request id in an event id, in bytes of JSON.
///
/// Event ids have to be short, because clients send them in a header.
const MAX_REQUEST_ID: usize = 256;

/// Maximum number of decimal digits in a `u64`.
const MAX_DIGITS: usize = 20;

/// Maximum length in bytes of a suffix whose request id is a number.
const MAX_SUFFIX: usize = 3 + 16 + 2 * MAX_DIGITS;

const HEX_DIGITS: [u8; 16] = *b"0123456789abcdef";

/// Separates the parts of an event id.
const SEPARATOR: char = '~';

/// Identifies one run of an instance, or one restore of a session.
///
/// This is a random number. Its text form is 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Incarnation(u64);

/// The first 128 bits of a session id's SHA-256 hash. The text form is 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionHash([u8; 16]);

/// A call's number, unique within its incarnation. The text form is a decimal number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CallNumber(u64);

/// A call, as identified in an event id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedCall {
    pub(crate) number: CallNumber,
    /// The request id as JSON text, or `None` if it is too long.
    pub(crate) request: Option<String>,
}

/// An event id as seen by clients.
///
/// The text form is `<plain>~<incarnation>~<call number>~<request id>`. The request id is JSON text (so that `7` and `"7"` differ),
/// percent-encoded, and is omitted if it would be too long. If the event does not belong to a call, both the number and the request id are
/// omitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClusterEventId<'a> {
    /// The id assigned by the inner session manager.
    pub(crate) plain: &'a str,
    pub(crate) incarnation: Incarnation,
    /// The call on whose stream the event was sent.
    pub(crate) call: Option<NamedCall>,
}

/// The error for text that is not a valid identifier of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParseIdError;

// === impl Incarnation ===

impl Incarnation {
    /// Returns a random incarnation. Its 64 random bits make it unique.
    pub(crate) fn random() -> Self {
        Self(random())
    }

    /// Returns the same text as `Display`, but much more cheaply.
    fn digits(self) -> [u8; 16] {
        array::from_fn(|index| {
            let digit = (self.0 >> (60 - 4 * index)) as usize & 0xf;
            HEX_DIGITS.get(digit).copied().unwrap_or_default()
        })
    }
}

impl Display for Incarnation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Debug for Incarnation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl FromStr for Incarnation {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse_digits(text).map(Self)
    }
}

/// Returns 64 random bits that differ between forked processes.
fn random() -> u64 {
    // Std's `RandomState` is only a fallback, because a forked process inherits its keys.
    getrandom::u64().unwrap_or_else(|_unavailable| {
        let this_process = (process::id(), SystemTime::now());
        RandomState::new().hash_one(this_process)
    })
}

fn parse_digits(text: &str) -> Result<u64, ParseIdError> {
    let is_well_formed = text.len() == 16 && text.bytes().all(is_digit);
    let number = is_well_formed
        .then(|| u64::from_str_radix(text, 16).ok())
        .flatten();
    number.ok_or(ParseIdError)
}

/// Accepts what [`Display`] writes. `from_str_radix` would also accept uppercase digits and signs.
fn is_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

// === impl SessionHash ===

impl SessionHash {
    pub(crate) fn of(session_id: &str) -> Self {
        Self(hash(session_id))
    }

    /// Returns a number from 0 to 255, evenly distributed across sessions.
    pub(crate) fn spread(self) -> usize {
        let [first, ..] = self.0;
        first.into()
    }
}

impl Display for SessionHash {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl Debug for SessionHash {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

// === impl CallNumber ===

impl CallNumber {
    pub(crate) fn new(number: u64) -> Self {
        Self(number)
    }
}

impl Display for CallNumber {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.0, f)
    }
}

impl FromStr for CallNumber {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse_number(text).map(Self)
    }
}

fn parse_number(text: &str) -> Result<u64, ParseIdError> {
    let number: u64 = text.parse().map_err(|_| ParseIdError)?;
    // `parse` alone would accept a sign and leading zeros.
    (number.to_string() == text)
        .then_some(number)
        .ok_or(ParseIdError)
}

fn hash(text: &str) -> [u8; 16] {
    let digest: [u8; 32] = Sha256::digest(text).into();
    let mut half = [0; 16];
    for (to, from) in half.iter_mut().zip(digest) {
        *to = from;
    }
    half
}

// === impl ClusterEventId ===

impl<'a> ClusterEventId<'a> {
    pub(crate) fn new(plain: &'a str, incarnation: Incarnation, call: Option<NamedCall>) -> Self {
        let call = call.map(|call| NamedCall {
            request: call
                .request
                .filter(|request| request.len() <= MAX_REQUEST_ID),
            ..call
        });
        Self {
            plain,
            incarnation,
            call,
        }
    }

    /// Returns the suffix to append to a stream's plain event ids.
    ///
    /// `call` is the call's number and its request id, which must be a number, or `None` if the stream does not belong to a call. The
    /// suffix is what [`Display`] would write, but at a tenth of the cost, which matters because every call needs one.
    pub(crate) fn suffix(incarnation: Incarnation, call: Option<(CallNumber, u64)>) -> String {
        let mut text = Vec::with_capacity(MAX_SUFFIX);
        text.push(SEPARATOR as u8);
        text.extend_from_slice(&incarnation.digits());
        text.push(SEPARATOR as u8);
        if let Some((number, _)) = call {
            push_number(&mut text, number.0);
        }
        text.push(SEPARATOR as u8);
        if let Some((_, request)) = call {
            push_number(&mut text, request);
        }
        String::from_utf8(text).unwrap_or_default()
    }

    /// Parses an event id from a client, which may be forged. Returns `None` if it is malformed.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        // Split from the right, because the plain id can be anything and may itself contain separators.
        let mut parts = text.rsplitn(4, SEPARATOR);
        let request = parts.next()?;
        let number = parts.next()?;
        let incarnation = parts.next()?.parse().ok()?;
        let plain = parts.next()?;
        let request = percent_decode_str(request).decode_utf8().ok()?.into_owned();
        let request = Some(request).filter(|request| !request.is_empty());
        let call = match number.parse() {
            Ok(number) => Some(NamedCall { number, request }),
            Err(ParseIdError) if number.is_empty() && request.is_none() => None,
            Err(ParseIdError) => return None,
        };
        Some(Self {
            plain,
            incarnation,
            call,
        })
    }
}

/// Appends the text that `Display` would write, but much more cheaply.
fn push_number(text: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; MAX_DIGITS];
    let mut unused = MAX_DIGITS;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
        unused -= 1;
        if number == 0 {
            break;
        }
    }
    text.extend_from_slice(digits.get(unused..).unwrap_or_default());
}

impl Display for ClusterEventId<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}{SEPARATOR}{}{SEPARATOR}",
            self.plain, self.incarnation
        )?;
        match &self.call {
            Some(NamedCall { number, request }) => {
                let request = request.as_deref().unwrap_or_default();
                let request = utf8_percent_encode(request, NON_ALPHANUMERIC);
                write!(f, "{number}{SEPARATOR}{request}")
            }
            None => write!(f, "{SEPARATOR}"),
        }
    }
}

// === impl ParseIdError ===

impl Display for ParseIdError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("invalid identifier")
    }
}

impl Error for ParseIdError {}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;
    use seeded::seeded;

    use super::*;

    #[test]
    fn a_hash_is_half_of_the_sha_256_of_the_session_id() {
        // The first half of what `printf abc | sha256sum` prints.
        assert_eq!(
            SessionHash::of("abc").to_string(),
            "ba7816bf8f01cfea414140de5dae2223"
        );
        assert_eq!(
            format!("{:?}", SessionHash::of("abc")),
            "ba7816bf8f01cfea414140de5dae2223"
        );
    }

    #[test]
    fn no_two_starts_are_the_same_incarnation() {
        assert_ne!(Incarnation::random(), Incarnation::random());
    }

    /// A forked process inherits std's random state. Here, two threads have the same one instead.
    #[test]
    fn no_two_forks_are_the_same_incarnation() {
        let fork = || {
            thread::spawn(|| {
                let inherited = seeded(1, || RandomState::new().hash_one(0));
                (inherited, Incarnation::random())
            })
        };
        let [first, second] = [fork(), fork()].map(|fork| fork.join().unwrap());
        assert_eq!(first.0, second.0, "the inherited state");
        assert_ne!(first.1, second.1);
    }

    #[test]
    fn malformed_incarnations_are_rejected() {
        for text in [
            "",
            "1",
            "+123456789abcdef",
            "0123456789ABCDEF",
            "0123456789abcdef0",
            "0123456789abcde~",
        ] {
            assert_eq!(text.parse::<Incarnation>(), Err(ParseIdError), "{text}");
        }
    }

    #[test]
    fn an_event_id_without_a_valid_tag_is_not_parsed() {
        for text in [
            "",
            "0/1",
            "0/1~3~7",
            "0/1~0123~3~7",
            "~~~",
            "0/1~0123456789abcdef~7",
            "0/1~0123456789abcdef~~7",
            "0/1~0123456789abcdef~+3~7",
            "0/1~0123456789abcdef~03~7",
            "0/1~0123456789abcdef~18446744073709551616~7",
            "0/1~0123456789abcdef~3~%FF",
        ] {
            assert_eq!(ClusterEventId::parse(text), None, "{text}");
        }
    }

    fn call(number: u64, request: &str) -> Option<NamedCall> {
        let number = CallNumber(number);
        let request = Some(request.to_owned());
        Some(NamedCall { number, request })
    }

    #[test]
    fn a_call_whose_request_id_is_too_long_for_a_header_is_identified_by_its_number() {
        let incarnation = Incarnation::random();
        let long = format!("\"{}\"", "x".repeat(MAX_REQUEST_ID));
        let id = ClusterEventId::new("0/1", incarnation, call(3, &long)).to_string();
        assert_eq!(id, format!("0/1~{incarnation}~3~"));
        let parsed = ClusterEventId::parse(&id).and_then(|id| id.call).unwrap();
        assert_eq!((parsed.number, parsed.request), (CallNumber(3), None));
    }

    #[test]
    fn the_suffix_of_an_id_equals_what_display_writes() {
        let incarnation = Incarnation::random();
        for numbers in [None, Some((0, 0)), Some((3, 7)), Some((u64::MAX, u64::MAX))] {
            let named = numbers.and_then(|(number, request)| call(number, &request.to_string()));
            let numbers = numbers.map(|(number, request)| (CallNumber(number), request));
            let suffix = ClusterEventId::suffix(incarnation, numbers);
            assert_eq!(
                suffix,
                ClusterEventId::new("", incarnation, named).to_string()
            );
        }
    }

    proptest! {
        #[test]
        fn event_ids_round_trip(
            plain: String, incarnation: u64, number: u64, request in "(?s).{1,60}", is_of_a_call: bool,
        ) {
            let call = call(number, &request).filter(|_| is_of_a_call);
            let id = ClusterEventId::new(&plain, Incarnation(incarnation), call);
            let text = id.to_string();
            prop_assert_eq!(ClusterEventId::parse(&text), Some(id.clone()));
            let encoded = text.strip_prefix(plain.as_str()).unwrap();
            prop_assert!(encoded.bytes().all(|byte| byte.is_ascii_graphic()), "safe in a header: {}", encoded);
        }
    }
}
