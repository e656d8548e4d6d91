//! Reads the parts of a JSON-RPC message that the proxy needs in order to route it.
//!
//! The proxy forwards messages as bytes, so it only has to find the few members that matter for routing. A single pass finds
//! them, skips all other values, and preserves ids exactly as they were sent.
//!
//! 1. **Bytes, not types.** Ids, tokens and parameters are borrowed from the text.
//! 2. **One interpretation.** If a member that the proxy reads is duplicated, [`Message::read`] returns `None`, because two
//!    parsers might pick different values. If the duplicate is inside the `params`, the message is treated as if it had no
//!    `params`.
//! 3. **Ids are compared by value** ([`IdKey`]), because a server may answer `1.0` with `1`, or `"\u0061"` with `"a"`. A number
//!    never equals a string.
//!
//! ```
//! use mcp_cancel_proxy::message::{Kind, Message};
//!
//! let text = br#"{"jsonrpc":"2.0","id":1.0,"method":"tools/call","params":{"_meta":{"progressToken":"p"}}}"#;
//! let message = Message::read(text).unwrap();
//! assert_eq!(message.kind, Kind::Request);
//! assert_eq!(message.id, Some("1.0"));
//! assert_eq!(message.method.as_deref(), Some("tools/call"));
//! assert_eq!(message.params().progress_token, Some(r#""p""#));
//! ```

use std::borrow::Cow;

use bytes::Bytes;
use mcp_cancel_on_disconnect::RequestId;
use memchr::memchr2;
use serde::{Deserialize, Deserializer, de::IgnoredAny};
use serde_json::{Number, value::RawValue};

mod scan;

pub(crate) use self::scan::Scanner;

/// Maximum size of a request body.
///
/// The layer has the same limit, and so do the SDKs' servers.
pub const MAX_BODY: usize = 4 * 1024 * 1024;

/// Maximum number of messages in a batch.
///
/// This matches the number of calls that a command's session can have open.
const MAX_BATCH: usize = 1024;

/// The value that `jsonrpc` must have, as JSON text.
const VERSION: &str = r#""2.0""#;

/// A JSON-RPC message.
#[derive(Debug, Clone)]
pub struct Message<'a> {
    /// What kind of message this is.
    pub kind: Kind,
    /// The `id`, as JSON text. This may be `null`, as in the error for an unparsable request.
    pub id: Option<&'a str>,
    /// The `method`, or `None` for a response.
    pub method: Option<Cow<'a, str>>,
    /// Whether the message contains `"jsonrpc": "2.0"`. Without it, a line of JSON from a server may be log output.
    pub has_version: bool,
    params: Option<&'a RawValue>,
}

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Has a `method` and an `id`.
    Request,
    /// Has a `method` but no `id`.
    Notification,
    /// Has a `result` or an `error`, but no `method`.
    Response,
}

/// The members of `params` that the proxy reads. Ids and tokens are JSON text.
#[derive(Debug, Clone, Default)]
pub struct Params<'a> {
    /// The `requestId` in a `notifications/cancelled`.
    pub request_id: Option<&'a str>,
    /// The `progressToken` in a `notifications/progress`, or `_meta.progressToken` in a request.
    pub progress_token: Option<&'a str>,
    /// The `protocolVersion` in an `initialize`.
    pub protocol_version: Option<Cow<'a, str>>,
    /// The revision in `_meta`, where clients using revision 2026-07-28 put it.
    pub revision: Option<Cow<'a, str>>,
}

/// An id or a token, compared and hashed by value.
///
/// ```
/// use mcp_cancel_proxy::message::IdKey;
///
/// let key = |text| IdKey::of(text).unwrap();
/// assert_eq!(key("1"), key("1.0"));
/// assert_ne!(key("1"), key("\"1\""));
/// assert!(IdKey::of("null").is_none());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdKey(Value);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Value {
    Integer(i128),
    /// Any other number, exactly as it was written.
    Number(Box<str>),
    Text(Box<str>),
}

/// A key shared by all ids that a server might confuse with each other.
///
/// For example, JavaScript reads `9007199254740993` as `9007199254740992`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LooseIdKey(LooseValue);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum LooseValue {
    /// The bits of an `f64`.
    Number(u64),
    Text(Box<str>),
}

#[derive(Deserialize)]
struct Members<'a> {
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    jsonrpc: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(default, deserialize_with = "deserialize_presence")]
    result: Presence,
    #[serde(default, deserialize_with = "deserialize_presence")]
    error: Presence,
}

/// Whether a member is present and whether it is `null`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Presence {
    #[default]
    Absent,
    Null,
    Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ParamMembers<'a> {
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    request_id: Option<&'a RawValue>,
    #[serde(borrow)]
    progress_token: Option<&'a RawValue>,
    #[serde(borrow)]
    protocol_version: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta")]
    meta: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta<'a> {
    #[serde(borrow)]
    progress_token: Option<&'a RawValue>,
    #[serde(borrow, rename = "io.modelcontextprotocol/protocolVersion")]
    revision: Option<&'a RawValue>,
}

/// Deserializes a member as `Some`, even if it is `null`. An absent member is `None` by default.
fn deserialize_present<'de, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

fn deserialize_presence<'de, D: Deserializer<'de>>(value: D) -> Result<Presence, D::Error> {
    let value = Option::<IgnoredAny>::deserialize(value)?;
    Ok(value.map_or(Presence::Null, |_| Presence::Value))
}

/// Returns `true` if a message with this `result` and this `error` is a response.
///
/// A response has only one of the two, but some servers also send the other as `null`.
fn is_response(result: Presence, error: Presence) -> bool {
    result != error
}

// === impl Message ===

impl<'a> Message<'a> {
    /// Parses a single message. Returns `None` for any other text, such as a batch.
    pub fn read(text: &'a [u8]) -> Option<Self> {
        // serde also accepts an array for a struct, but an array is a batch.
        let first = text.trim_ascii_start().first();
        let members: Members<'a> = match first {
            Some(b'{') => serde_json::from_slice(text).ok()?,
            _ => return None,
        };
        let kind = match (&members.method, members.id, members.result, members.error) {
            (Some(_), Some(_), Presence::Absent, Presence::Absent) => Kind::Request,
            (Some(_), None, Presence::Absent, Presence::Absent) => Kind::Notification,
            (None, _, result, error) if is_response(result, error) => Kind::Response,
            _ => return None,
        };
        Some(Self {
            kind,
            id: members.id.map(RawValue::get),
            method: members.method,
            has_version: members
                .jsonrpc
                .is_some_and(|version| version.get() == VERSION),
            params: members.params,
        })
    }

    /// Returns `true` if this is progress or a log message, which can safely be lost.
    pub fn is_droppable(&self) -> bool {
        self.kind == Kind::Notification && self.method.as_deref().is_some_and(is_droppable)
    }

    /// Returns `true` if this message answers the request with this id.
    pub fn answers(&self, request: &IdKey) -> bool {
        self.answered_id().is_some_and(|id| id == *request)
    }

    /// Returns the id of the request that this message answers.
    pub(crate) fn answered_id(&self) -> Option<IdKey> {
        let id = self.id.filter(|_| self.kind == Kind::Response);
        id.and_then(IdKey::of)
    }

    /// Replaces the `requestId` in the `params` with `id`, and returns the new text.
    ///
    /// `text` must be the text that this message was parsed from. Returns `None` if the message has no `requestId`, or if it is
    /// already `id`.
    pub(crate) fn with_request_id(&self, text: &[u8], id: &str) -> Option<Bytes> {
        let old = self.params().request_id.filter(|old| *old != id)?;
        // This works because the id is borrowed from the text.
        let start = (old.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
        let (before, after) = (text.get(..start)?, text.get(start + old.len()..)?);
        Some([before, id.as_bytes(), after].concat().into())
    }

    /// Returns the name of the tool called by a `tools/call`.
    ///
    /// Returns `None` for any other method, or if the name can't be parsed.
    pub fn tool(&self) -> Option<Cow<'a, str>> {
        if self.method.as_deref() == Some("tools/call") {
            string(object::<ParamMembers<'a>>(self.params)?.name)
        } else {
            None
        }
    }

    /// Parses the `params`. A missing or mistyped member is `None`.
    pub fn params(&self) -> Params<'a> {
        let members: ParamMembers<'a> = object(self.params).unwrap_or_default();
        let meta: Meta<'a> = object(members.meta).unwrap_or_default();
        // In a request, a `progressToken` outside of `_meta` is an ordinary parameter.
        let progress_token = match self.kind {
            Kind::Request => meta.progress_token,
            _ => members.progress_token,
        };
        Params {
            request_id: members.request_id.map(RawValue::get),
            progress_token: progress_token.map(RawValue::get),
            protocol_version: string(members.protocol_version),
            revision: string(meta.revision),
        }
    }
}

/// Splits a batch (revision 2025-03-26) into its messages, each exactly as it was written.
///
/// Returns `None` if the text is not an array of 1 to [`MAX_BATCH`] values.
pub(crate) fn batch(text: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = text.trim_ascii().strip_prefix(b"[")?;
    let mut messages = Vec::new();
    while messages.len() < MAX_BATCH {
        let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<&RawValue>();
        messages.push(values.next()?.ok()?.get().as_bytes());
        rest = rest.get(values.byte_offset()..)?.trim_ascii_start();
        match rest.split_first()? {
            (b',', more) => rest = more,
            (b']', []) => return Some(messages),
            _ => return None,
        }
    }
    None
}

/// Returns `true` if notifications with this method can safely be lost.
fn is_droppable(method: &str) -> bool {
    matches!(method, "notifications/progress" | "notifications/message")
}

/// A string, borrowed if it contains no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

fn string(value: Option<&RawValue>) -> Option<Cow<'_, str>> {
    let text: Text<'_> = serde_json::from_str(value?.get()).ok()?;
    Some(text.0)
}

fn object<'a, T: Deserialize<'a>>(value: Option<&'a RawValue>) -> Option<T> {
    let text = value?.get();
    // serde also accepts an array for a struct.
    text.starts_with('{')
        .then(|| serde_json::from_str(text).ok())?
}

// === impl IdKey ===

impl IdKey {
    /// Parses an id from its JSON text.
    ///
    /// Returns `None` if the id is neither a string nor a number.
    pub fn of(text: &str) -> Option<Self> {
        let text = text.trim_ascii();
        let value = match text.as_bytes().first()? {
            b'"' => Value::Text(serde_json::from_str(text).ok()?),
            b'-' | b'0'..=b'9' => Value::number(text)?,
            _ => return None,
        };
        Some(Self(value))
    }

    pub(crate) fn is_text(&self) -> bool {
        matches!(self.0, Value::Text(_))
    }

    /// Converts a string that contains a number to that number, and a number to a string.
    ///
    /// This is needed because some servers answer `7` with `"7"`, and clients accept that. Returns `None` for any other
    /// string.
    pub(crate) fn counterpart(&self) -> Option<Self> {
        Some(Self(match &self.0 {
            Value::Text(text) => match text.as_bytes().first()? {
                b'-' | b'0'..=b'9' => Value::number(text)?,
                _ => return None,
            },
            Value::Integer(integer) => Value::Text(integer.to_string().into()),
            Value::Number(text) => Value::Text(text.clone()),
        }))
    }

    /// Returns `true` if the two ids are equal or [counterparts](Self::counterpart).
    pub(crate) fn resembles(&self, other: &Self) -> bool {
        self == other
            || self.counterpart().as_ref() == Some(other)
            || other.counterpart().as_ref() == Some(self)
    }

    /// Converts an id parsed by the layer.
    pub fn of_call(id: &RequestId) -> Self {
        Self(match id {
            RequestId::Number(number) => Value::Integer((*number).into()),
            RequestId::String(text) => Value::Text((&**text).into()),
        })
    }

    /// Returns the key that this id shares with any id that a server might confuse with it.
    pub fn loose(&self) -> LooseIdKey {
        let float = match &self.0 {
            Value::Text(text) => return LooseIdKey(LooseValue::Text(text.clone())),
            Value::Integer(integer) => *integer as f64,
            // Every JSON number parses as an `f64`. Adding 0 turns -0 into 0.
            Value::Number(text) => text.parse().unwrap_or(f64::NAN) + 0.0,
        };
        LooseIdKey(LooseValue::Number(float.to_bits()))
    }
}

// === impl Value ===

impl Value {
    /// Parses a number. Returns `None` if the text is not a JSON number.
    fn number(text: &str) -> Option<Self> {
        /// The first integer that shares its `f64` with another integer.
        const FIRST_SHARED: f64 = 9_007_199_254_740_992.0;
        if let Ok(integer) = text.parse::<i128>() {
            return Some(Self::Integer(integer));
        }
        let _is_json: Number = serde_json::from_str(text).ok()?;
        let float: f64 = text.parse().ok()?;
        let integral = float.fract() == 0.0 && float.abs() < FIRST_SHARED;
        Some(if integral {
            Self::Integer(float as i128)
        } else {
            Self::Number(text.into())
        })
    }
}

/// Puts JSON text on a single line by replacing line breaks with spaces.
///
/// This does not change its meaning, because line breaks are white space outside of strings, and invalid inside them.
pub fn single_line(json: Bytes) -> Bytes {
    if memchr2(b'\n', b'\r', &json).is_none() {
        return json;
    }
    let spaced = json.iter().map(|byte| match byte {
        b'\n' | b'\r' => b' ',
        other => *other,
    });
    spaced.collect()
}

/// Returns up to `max` bytes of a string, with control characters and line breaks replaced.
///
/// If the string is longer, the result ends with an ellipsis.
pub(crate) fn sanitize(text: &[u8], max: usize) -> String {
    let prefix = text.get(..max).unwrap_or(text);
    let clean = |char: char| {
        if char.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            char
        }
    };
    let mut sanitized: String = String::from_utf8_lossy(prefix).chars().map(clean).collect();
    if prefix.len() < text.len() {
        sanitized.push('…');
    }
    sanitized
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_is_one_line_and_bounded() {
        assert_eq!(
            sanitize(b"a\x1b[31m\xff\n", 100),
            "a\u{fffd}[31m\u{fffd}\u{fffd}"
        );
        assert_eq!(sanitize(b"abcdef", 3), "abc…");
    }

    #[test]
    fn a_message_on_one_line_has_the_same_value() {
        let pretty = Bytes::from_static(b"{\r\n  \"id\": 1,\n  \"result\": \"a\\nb\"\r\n}");
        let line = single_line(pretty.clone());
        assert_eq!(line.len(), pretty.len());
        assert!(!line.iter().any(|byte| matches!(byte, b'\n' | b'\r')));
        let value = |json: &[u8]| serde_json::from_slice::<serde_json::Value>(json).unwrap();
        assert_eq!(value(&line), value(&pretty));
    }

    #[test]
    fn ids_that_a_server_may_confuse_have_the_same_loose_key() {
        let loose = |text| IdKey::of(text).unwrap().loose();
        for (one, other) in [
            ("1", "1.0"),
            ("0", "-0"),
            ("9007199254740993", "9007199254740992"),
            ("0.1", "1e-1"),
            (r#""a/b""#, r#""a\/\u0062""#),
        ] {
            assert_eq!(loose(one), loose(other), "{one} {other}");
        }
        assert_ne!(loose("1"), loose("\"1\""));
        assert_ne!(loose("1"), loose("2"));
    }

    fn kind(text: &str) -> Option<Kind> {
        Message::read(text.as_bytes()).map(|message| message.kind)
    }

    #[test]
    fn the_members_determine_the_kind_of_a_message() {
        for (text, expected) in [
            (r#"{"id":1,"method":"a"}"#, Some(Kind::Request)),
            (r#"{"id":null,"method":"a"}"#, Some(Kind::Request)),
            (r#" {"method":"a","x":[1,{}]}"#, Some(Kind::Notification)),
            (r#"{"id":1,"result":null}"#, Some(Kind::Response)),
            (r#"{"error":{},"id":null}"#, Some(Kind::Response)),
            (r#"{"id":1,"result":1,"error":1}"#, None),
            (r#"{"id":1,"result":1,"error":null}"#, Some(Kind::Response)),
            (r#"{"id":1,"result":null,"error":{}}"#, Some(Kind::Response)),
            (r#"{"id":1,"result":null,"error":null}"#, None),
            (r#"{"id":1,"result":null,"result":1}"#, None),
            (r#"{"id":1,"method":"a","result":1}"#, None),
            (r#"{"id":1}"#, None),
            (r#"{"id":1,"id":2,"method":"a"}"#, None),
            (r#"{"id":1,"method":7}"#, None),
            (r#"{"id":1,"method":"a"} {}"#, None),
            (r#"{"id":1,"method":"a""#, None),
            (r#"[{"id":1,"method":"a"}]"#, None),
            (r#"[1,"a",{},true,true]"#, None),
            ("7", None),
            ("", None),
        ] {
            assert_eq!(kind(text), expected, "{text}");
        }
    }

    #[test]
    fn ids_are_kept_exactly_as_they_were_sent() {
        for id in [
            "1",
            "1.0",
            "-0",
            "1e400",
            "99999999999999999999999999",
            r#""\u0061""#,
            "null",
        ] {
            let text = format!(r#"{{"id":{id},"method":"a"}}"#);
            assert_eq!(Message::read(text.as_bytes()).unwrap().id, Some(id));
        }
    }

    #[test]
    fn a_batch_is_split_into_values_exactly_as_they_were_written() {
        let messages = |text: &'static str| batch(text.as_bytes());
        let two = [&br#"{"id":1.0,"a":[1,{}]}"#[..], b"7"];
        assert_eq!(
            messages(" [ {\"id\":1.0,\"a\":[1,{}]} , 7 ]\n").unwrap(),
            two
        );
        for text in [
            "", "{}", "[]", "[", "[1", "[1,", "[1,]", "[1]]", "[1] 2", "[1 2]", "[,1]", "[x]",
        ] {
            assert_eq!(messages(text), None, "{text}");
        }
        let many = format!("[{}1]", "1,".repeat(MAX_BATCH - 1));
        assert_eq!(batch(many.as_bytes()).unwrap().len(), MAX_BATCH);
        let more = format!("[{}1]", "1,".repeat(MAX_BATCH));
        assert_eq!(batch(more.as_bytes()), None);
        assert_eq!(batch(b"[\"\xff\"]"), None);
    }

    #[test]
    fn an_answer_is_matched_by_the_value_of_its_id() {
        let answers = |id: &str, request: &str| {
            let text = format!(r#"{{"id":{id},"result":{{}}}}"#);
            let message = Message::read(text.as_bytes()).unwrap();
            message.answers(&IdKey::of(request).unwrap())
        };
        for (id, request) in [
            ("1", "1.0"),
            ("1e2", "100"),
            ("\"\\u0061\"", "\"a\""),
            ("0.5", "0.5"),
            ("99999999999999999999", "99999999999999999999"),
        ] {
            assert!(answers(id, request), "{id} {request}");
            assert!(answers(request, id), "{request} {id}");
        }
        for (id, request) in [
            ("1", "\"1\""),
            ("1", "2"),
            ("null", "1"),
            ("9007199254740993.0", "9007199254740992"),
        ] {
            assert!(!answers(id, request), "{id} {request}");
        }
    }

    #[test]
    fn an_id_resembles_its_text_and_no_other() {
        let key = |text| IdKey::of(text).unwrap();
        for (one, other) in [
            ("7", "\"7\""),
            ("1.0", "\"1\""),
            ("1", "\"1.0\""),
            ("-0.5", "\"-0.5\""),
        ] {
            assert!(key(one).resembles(&key(other)), "{one} {other}");
            assert!(key(other).resembles(&key(one)), "{other} {one}");
        }
        for (one, other) in [
            ("7", "\"8\""),
            ("7", "\" 7\""),
            ("7", "\"+7\""),
            ("\"7\"", "\"7.0\""),
            ("7", "\"\""),
        ] {
            assert!(!key(one).resembles(&key(other)), "{one} {other}");
        }
    }

    #[test]
    fn a_server_request_answers_nothing() {
        let message = Message::read(br#"{"id":1,"method":"ping"}"#).unwrap();
        assert!(!message.answers(&IdKey::of("1").unwrap()));
        assert!(!message.is_droppable());
    }

    #[test]
    fn only_progress_and_log_messages_may_be_dropped() {
        for (method, droppable) in [
            ("notifications/progress", true),
            ("notifications/message", true),
            ("notifications/cancelled", false),
            ("notifications/tools/list_changed", false),
        ] {
            let text = format!(r#"{{"method":"{method}"}}"#);
            let message = Message::read(text.as_bytes()).unwrap();
            assert_eq!(message.is_droppable(), droppable, "{method}");
        }
        let request = Message::read(br#"{"id":1,"method":"notifications/progress"}"#).unwrap();
        assert!(!request.is_droppable());
    }

    #[test]
    fn params_of_another_type_are_ignored() {
        for params in [
            "[]",
            "null",
            "7",
            r#"{"_meta":[]}"#,
            r#"{"protocolVersion":7}"#,
        ] {
            let text = format!(r#"{{"id":1,"method":"a","params":{params}}}"#);
            let params = Message::read(text.as_bytes()).unwrap().params();
            assert!(params.request_id.is_none() && params.progress_token.is_none());
            assert!(params.protocol_version.is_none());
        }
        let text =
            br#"{"method":"a","params":{"requestId":1.50,"protocolVersion":"2025\u002d11-25"}}"#;
        let params = Message::read(text).unwrap().params();
        assert_eq!(params.request_id, Some("1.50"));
        assert_eq!(params.protocol_version.as_deref(), Some("2025-11-25"));
    }

    #[test]
    fn a_request_has_its_progress_token_in_its_meta() {
        for (message, expected) in [
            (
                r#"{"id":1,"method":"x","params":{"progressToken":"own","_meta":{"progressToken":"p"}}}"#,
                Some(r#""p""#),
            ),
            (
                r#"{"id":1,"method":"x","params":{"progressToken":"own"}}"#,
                None,
            ),
            (
                r#"{"method":"notifications/progress","params":{"progressToken":"p","_meta":{"progressToken":"other"}}}"#,
                Some(r#""p""#),
            ),
        ] {
            let read = Message::read(message.as_bytes()).unwrap();
            assert_eq!(read.params().progress_token, expected, "{message}");
        }
    }
}
