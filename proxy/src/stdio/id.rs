//! The ids of requests, and progress tokens, as a server gives them back.

/// The longest id or token: 1 KiB. They are kept as long as their calls, and longer than their messages.
const MAX_LENGTH: usize = 1024;

/// The id of a request, or a progress token, as it was written: `1` is neither `"1"` nor `1.0`.
///
/// Servers give ids back as they got them, at most with other escapes. One that changes a number answers nobody: it
/// would be a guess whom it means.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Id {
    /// A number, by its digits.
    Number(Box<str>),
    /// A string, without its escapes.
    Text(Box<str>),
}

/// What two ids have in common that a server may take for one another: to JavaScript `1` and `1.0` are the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Number(u64),
    Text(Box<str>),
}

// === impl Id ===

impl Id {
    /// Reads an id from its JSON text. `None` if it is neither a string nor a number, or too long.
    #[must_use]
    pub fn read(json: &str) -> Option<Self> {
        if json.len() > MAX_LENGTH {
            return None;
        }
        match json.bytes().next()? {
            b'"' => serde_json::from_str(json).ok().map(Self::Text),
            b'-' | b'0'..=b'9' => Some(Self::Number(json.into())),
            _ => None,
        }
    }

    pub(super) fn key(&self) -> Key {
        match self {
            Self::Text(text) => Key::Text(text.clone()),
            Self::Number(digits) => {
                // Every number of JSON is one of these, and -0 is 0.
                let number: f64 = digits.parse().unwrap_or(f64::NAN);
                Key::Number((number + 0.0).to_bits())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(json: &str) -> Id {
        Id::read(json).unwrap()
    }

    #[test]
    fn a_number_a_string_and_a_fraction_are_three_ids() {
        assert_ne!(id("1"), id("\"1\""));
        assert_ne!(id("1"), id("1.0"));
    }

    #[test]
    fn numbers_that_a_server_may_take_for_one_another_have_one_key() {
        assert_eq!(id("1").key(), id("1.0").key());
        assert_eq!(id("0").key(), id("-0").key());
        assert_eq!(id("9007199254740993").key(), id("9007199254740992").key());
        assert_ne!(id("1").key(), id("\"1\"").key());
        assert_ne!(id("1").key(), id("2").key());
    }

    #[test]
    fn an_escape_makes_no_other_id() {
        assert_eq!(id(r#""a/b""#), id(r#""a\/\u0062""#));
    }

    #[test]
    fn what_is_neither_string_nor_number_is_no_id() {
        for json in ["null", "true", "{}", "[1]", "", "\"\\ud800\""] {
            assert_eq!(Id::read(json), None, "{json}");
        }
        assert_eq!(Id::read(&"1".repeat(MAX_LENGTH + 1)), None);
    }
}
