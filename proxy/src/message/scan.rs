//! Classifies, piece by piece, a message that is too long to store or can't be parsed.
//!
//! 1. **Bounded memory.** The scanner stores the name of one member at a time, and the values of `jsonrpc`, `id` and `method`.
//!    It stores just enough of a `result` or `error` to recognise `null`, and nothing of any other member.
//! 2. **When in doubt, a message is not an answer.** A message is only recognised as an answer if it has exactly one `id`, no `method`,
//!    and either a `result` or an `error`. It must also end with its object's closing brace. To find the end of any other
//!    member, the scanner just counts brackets.

use std::mem;

use memchr::memchr2;

use super::{IdKey, Presence, VERSION, is_droppable, is_response};

/// Maximum size of a stored name or value.
///
/// As a consequence, the answer to a call with a longer id is not recognised.
const MAX_TEXT: usize = 2 * 1024;

/// The state of a scan.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    /// How many brackets are open.
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
    /// The member whose value is being read.
    member: Option<Member>,
    /// The stored part of the current name or value.
    text: Vec<u8>,
    version: Option<Vec<u8>>,
    id: Option<Vec<u8>>,
    method: Option<Vec<u8>>,
    result: Presence,
    error: Presence,
    has_ended: bool,
    is_ambiguous: bool,
}

const NULL: &[u8] = b"null";

/// The members that the scanner distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Member {
    Version,
    Id,
    Method,
    Result,
    Error,
    Other,
}

// === impl Scanner ===

impl Scanner {
    /// Scans a complete message.
    pub(crate) fn of(message: &[u8]) -> Self {
        let mut scanner = Self::default();
        scanner.read(message);
        scanner
    }

    /// Reads the next bytes of the message.
    pub(crate) fn read(&mut self, mut bytes: &[u8]) {
        loop {
            if self.is_in_string && !self.is_escaped {
                let plain = memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len());
                let (text, rest) = bytes.split_at(plain);
                self.store(text);
                bytes = rest;
            }
            let Some((byte, rest)) = bytes.split_first() else {
                return;
            };
            self.step(*byte);
            bytes = rest;
        }
    }

    /// Returns the id of the call that the message answers.
    ///
    /// Returns `None` if the message has not been read in full yet, is not an answer, or is ambiguous.
    pub(crate) fn answers(self) -> Option<IdKey> {
        let is_answer = self.has_ended
            && !self.is_ambiguous
            && self.method.is_none()
            && is_response(self.result, self.error);
        let id = self.id.filter(|_| is_answer)?;
        IdKey::of(str::from_utf8(&id).ok()?)
    }

    /// Like [`answers`](Self::answers), but for text that might not be a message.
    ///
    /// Returns `None` unless the text contains `"jsonrpc": "2.0"`.
    pub(crate) fn answers_with_version(self) -> Option<IdKey> {
        if self.has_version() {
            self.answers()
        } else {
            None
        }
    }

    /// Returns `true` if the part read so far contains `"jsonrpc": "2.0"`.
    fn has_version(&self) -> bool {
        let version = self.version.as_ref();
        version.is_some_and(|version| version.trim_ascii() == VERSION.as_bytes())
    }

    /// Returns `true` if the message is a notification that can safely be dropped.
    ///
    /// Like [`Message::is_droppable`](super::Message::is_droppable), but only takes into account what has been read so far.
    pub(crate) fn is_droppable(&self) -> bool {
        let method: Option<String> = self
            .method
            .as_ref()
            .and_then(|method| serde_json::from_slice(method).ok());
        let is_other = self.is_ambiguous || self.id.is_some() || self.result != self.error;
        !is_other && method.is_some_and(|method| is_droppable(&method))
    }

    /// Returns `true` if the message has been read in full and is a request.
    pub(crate) fn is_request(&self) -> bool {
        self.has_ended && !self.is_ambiguous && self.id.is_some() && self.method.is_some()
    }

    fn step(&mut self, byte: u8) {
        if self.is_in_string {
            self.store(&[byte]);
            match byte {
                _ if mem::take(&mut self.is_escaped) => {}
                b'\\' => self.is_escaped = true,
                b'"' => self.is_in_string = false,
                _ => {}
            }
            return;
        }
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => self.store(b" "),
            b'{' if self.depth == 0 && !self.has_ended => self.depth = 1,
            _ if self.depth == 0 => self.is_ambiguous = true,
            b'}' if self.depth == 1 => {
                self.end_member();
                (self.depth, self.has_ended) = (0, true);
            }
            b',' if self.depth == 1 => self.end_member(),
            b':' if self.depth == 1 && self.member.is_none() => self.begin_value(),
            _ => {
                self.store(&[byte]);
                match byte {
                    b'"' => self.is_in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' => self.depth -= 1,
                    _ => {}
                }
            }
        }
    }

    /// Stores bytes that belong to a name, the version, the id or the method.
    ///
    /// Stores just enough of a result or an error to recognise `null`.
    fn store(&mut self, bytes: &[u8]) {
        match self.member {
            Some(Member::Other) => return,
            Some(Member::Result | Member::Error) => {
                let missing = NULL.len() + 1 - self.text.len().min(NULL.len() + 1);
                if bytes != b" " {
                    let bytes = bytes.get(..missing).unwrap_or(bytes);
                    self.text.extend_from_slice(bytes);
                }
                return;
            }
            Some(Member::Version | Member::Id | Member::Method) | None => {}
        }
        if self.text.len() + bytes.len() <= MAX_TEXT {
            self.text.extend_from_slice(bytes)
        } else {
            // No known name or method is this long. The replacement is not JSON, so it can't equal any id.
            self.text = vec![0; MAX_TEXT]
        }
    }

    fn begin_value(&mut self) {
        let name = mem::take(&mut self.text);
        let name: Option<String> = serde_json::from_slice(&name).ok();
        self.member = Some(match name.as_deref() {
            Some("jsonrpc") => Member::Version,
            Some("id") => Member::Id,
            Some("method") => Member::Method,
            Some("result") => Member::Result,
            Some("error") => Member::Error,
            _ => Member::Other,
        });
    }

    fn end_member(&mut self) {
        let text = mem::take(&mut self.text);
        match self.member.take() {
            Some(Member::Version) => self.is_ambiguous |= self.version.replace(text).is_some(),
            Some(Member::Id) => self.is_ambiguous |= self.id.replace(text).is_some(),
            Some(Member::Method) => self.is_ambiguous |= self.method.replace(text).is_some(),
            Some(Member::Result) => self.is_ambiguous |= set(&mut self.result, &text),
            Some(Member::Error) => self.is_ambiguous |= set(&mut self.error, &text),
            Some(Member::Other) => {}
            None => self.is_ambiguous = true,
        }
    }
}

/// Sets a member. Returns `true` if it had already been set.
fn set(member: &mut Presence, value: &[u8]) -> bool {
    let value = match value {
        NULL => Presence::Null,
        _ => Presence::Value,
    };
    std::mem::replace(member, value) != Presence::Absent
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{Kind, Message},
        *,
    };

    /// Returns the call answered by a message, according to a scan in pieces of `size` bytes.
    fn scanned(message: &[u8], size: usize) -> Option<IdKey> {
        let mut scanner = Scanner::default();
        for piece in message.chunks(size) {
            scanner.read(piece);
        }
        assert!(scanner.text.capacity() <= 2 * MAX_TEXT);
        scanner.answers()
    }

    /// Returns the call answered by a message, according to the parser.
    fn parsed(message: &[u8]) -> Option<IdKey> {
        let message = Message::read(message)?;
        let id = message.id.filter(|_| message.kind == Kind::Response);
        id.and_then(IdKey::of)
    }

    #[test]
    fn the_answered_call_is_found_wherever_its_id_is() {
        for (message, answers) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{"id":8}}"#, Some("7")),
            (
                r#" { "result" : [{"id":8}] , "id" : "a\u0062" } "#,
                Some("\"ab\""),
            ),
            (
                r#"{"error":{"message":"\\\"id\":8,"},"\u0069d":-1.50e1}"#,
                Some("-15"),
            ),
            (r#"{"id":7,"result":"}","x":{"method":1}}"#, Some("7")),
            (r#"{"id":7,"method":"a"}"#, None),
            (r#"{"id":7,"method":"a","result":1}"#, None),
            (r#"{"id":7,"result":1,"error":1}"#, None),
            (r#"{"id":7,"result":{},"error": null }"#, Some("7")),
            (r#"{"id":7,"result":null,"error":{}}"#, Some("7")),
            (r#"{"id":7,"result":null,"error":null}"#, None),
            (r#"{"id":7,"result":null,"result":{}}"#, None),
            (r#"{"id":7,"id":8,"result":1}"#, None),
            (r#"{"id":null,"result":1}"#, None),
            (r#"{"id":{"id":7},"result":1}"#, None),
            (r#"{"x":{"id":7,"result":1}}"#, None),
            (r#"[{"id":7,"result":1}]"#, None),
            (r#"{"id":7,"result":1} {}"#, None),
            (r#"{"id":7,"result":1"#, None),
            (r#"{"id":7,"result":1,}"#, None),
            ("{}", None),
            ("x", None),
            ("", None),
        ] {
            let answers = answers.and_then(IdKey::of);
            assert_eq!(parsed(message.as_bytes()), answers, "{message}");
            for size in [1, 2, 3, 7, 1_000] {
                assert_eq!(
                    scanned(message.as_bytes(), size),
                    answers,
                    "{message} by {size}"
                );
            }
        }
    }

    #[test]
    fn the_scanner_and_the_parser_agree_on_the_version() {
        for (message, expected) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{}}"#, true),
            (r#"{"id":7,"result":{}, "jsonrpc" : "2.0" }"#, true),
            (r#"{"id":7,"result":{"jsonrpc":"2.0"}}"#, false),
            (r#"{"jsonrpc":2.0,"id":7,"result":{}}"#, false),
            (r#"{"jsonrpc":"1.0","id":7,"result":{}}"#, false),
            (r#"{"level":"error","id":7,"error":"issue 7"}"#, false),
        ] {
            let parsed = Message::read(message.as_bytes()).unwrap();
            assert_eq!(parsed.has_version, expected, "{message}");
            let scanned = Scanner::of(message.as_bytes());
            assert_eq!(scanned.has_version(), expected, "{message}");
        }
    }

    #[test]
    fn names_and_ids_that_are_too_long_are_ignored() {
        let long = "x".repeat(10 * MAX_TEXT);
        let name = format!(r#"{{"{long}":1,"id":7,"result":"{long}"}}"#);
        assert_eq!(scanned(name.as_bytes(), 100), IdKey::of("7"));
        let id = format!(r#"{{"id":"{long}","result":1}}"#);
        assert_eq!(scanned(id.as_bytes(), 100), None);
    }

    fn json() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            Just("id"),
            Just("method"),
            Just("result"),
            Just("error"),
            Just("\\u0069d"),
            Just("a\\\""),
            Just("}"),
            Just("\\\\")
        ];
        let leaf = prop_oneof![
            (0..20_u32).prop_map(|number| number.to_string()),
            word.clone().prop_map(|word| format!("\"{word}\"")),
            Just("null".to_owned()),
        ];
        leaf.prop_recursive(3, 20, 5, move |inner| {
            let members = proptest::collection::vec((word.clone(), inner.clone()), 0..5);
            let object = members.prop_map(|members| {
                let members = members.iter().map(|(name, value)| format!("\"{name}\" : {value}"));
                format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
            });
            let array = proptest::collection::vec(inner, 0..3);
            prop_oneof![4 => object, 1 => array.prop_map(|values| format!("[{}]", values.join(",")))]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_scan_agrees_with_a_parser_on_any_json(json in json(), size in 1..10_usize) {
            let (scanned, parsed) = (scanned(json.as_bytes(), size), parsed(json.as_bytes()));
            // Unlike the scanner, the parser ignores a `null` `method`.
            let is_null_method = scanned.is_none() && json.contains(r#""method" : null"#);
            prop_assert!(scanned == parsed || is_null_method, "{:?} {:?}", scanned, parsed);
        }
    }
}
