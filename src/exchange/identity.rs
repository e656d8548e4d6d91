//! The session and protocol revision specified by a request's headers.

use http::HeaderValue;

use crate::{
    call::{Scope, SessionKey},
    headers::Header,
};

/// The first revision without sessions. From this revision on, closing the response stream cancels the call.
const FIRST_STATELESS: &[u8] = b"2026-07-28";

/// The session id specified in a request's header.
#[derive(Debug, Clone)]
pub(super) enum SessionHeader {
    None,
    One(HeaderValue),
    /// Repeated, empty, or not accepted by `HeaderValue::to_str`.
    ///
    /// The call's session cannot be determined from this kind of header.
    Ambiguous,
}

/// The kind of protocol revision specified in a request's header or body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Revision {
    WithSessions,
    Stateless,
    /// Repeated, or not a revision date.
    Ambiguous,
}

// === impl SessionHeader ===

impl SessionHeader {
    pub(super) fn from_header(field: Header<'_>) -> Self {
        match field {
            Header::Absent => Self::None,
            Header::One(id) if is_readable(id.as_bytes()) => Self::One(id.clone()),
            Header::One(_) | Header::Several(_) => Self::Ambiguous,
        }
    }

    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(super) fn id(&self) -> Option<&str> {
        match self {
            Self::One(id) => str::from_utf8(id.as_bytes()).ok(),
            _ => None,
        }
    }

    /// Returns the session key if the header has exactly one readable id.
    ///
    /// `scope` maps the session id to the scope that issued it.
    pub(super) fn key(&self, scope: impl FnOnce(&str) -> Scope) -> Option<SessionKey> {
        let id = self.id()?;
        Some(SessionKey {
            scope: scope(id),
            id: id.into(),
        })
    }
}

/// Returns `true` if the id is non-empty and accepted by `HeaderValue::to_str`.
///
/// The loop over the bytes is branch-free, because this runs on every request with a session header.
fn is_readable(id: &[u8]) -> bool {
    let is_visible = |byte: u8| matches!(byte, b' '..=b'~' | b'\t');
    !id.is_empty() && id.iter().fold(true, |all, byte| all & is_visible(*byte))
}

// === impl Revision ===

impl Revision {
    pub(super) fn from_header(field: Header<'_>) -> Self {
        match field {
            Header::Absent => Self::WithSessions,
            Header::One(version) => Self::from_version(version.as_bytes()),
            Header::Several(_) => Self::Ambiguous,
        }
    }

    /// Returns the revision date if the header consists of exactly one date.
    pub(super) fn date(field: Header<'_>) -> Option<[u8; 10]> {
        let Header::One(version) = field else {
            return None;
        };
        let is_date = Self::from_version(version.as_bytes()) != Self::Ambiguous;
        is_date.then(|| version.as_bytes().try_into().ok())?
    }

    /// Classifies a revision by its name. Names are ISO 8601 dates, so lexicographic order is chronological.
    pub(super) fn from_version(version: &[u8]) -> Self {
        let [_, _, _, _, b'-', _, _, b'-', _, _] = version else {
            return Self::Ambiguous;
        };
        match version.iter().filter(|byte| byte.is_ascii_digit()).count() {
            8 if version < FIRST_STATELESS => Self::WithSessions,
            8 => Self::Stateless,
            _ => Self::Ambiguous,
        }
    }

    /// Merges the revisions from the header and the body. `Stateless` takes precedence, then `Ambiguous`.
    pub(super) fn merge(self, other: Self) -> Self {
        match (self, other) {
            (Self::Stateless, _) | (_, Self::Stateless) => Self::Stateless,
            (Self::Ambiguous, _) | (_, Self::Ambiguous) => Self::Ambiguous,
            _ => Self::WithSessions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(bytes: &[u8]) -> HeaderValue {
        HeaderValue::from_bytes(bytes).unwrap()
    }

    #[test]
    fn exactly_one_readable_session_header_names_a_session() {
        let one = value(b"abc");
        assert!(
            matches!(SessionHeader::from_header(Header::One(&one)), SessionHeader::One(id) if id == "abc")
        );
        assert!(matches!(
            SessionHeader::from_header(Header::Absent),
            SessionHeader::None
        ));
        let [empty, unreadable] = [&b""[..], b"\xff"].map(value);
        for ambiguous in [
            Header::Several(&one),
            Header::One(&empty),
            Header::One(&unreadable),
        ] {
            assert!(matches!(
                SessionHeader::from_header(ambiguous),
                SessionHeader::Ambiguous
            ));
        }
    }

    #[test]
    fn revisions_are_classified_by_date() {
        let classify = |version: &[u8]| Revision::from_header(Header::One(&value(version)));
        assert_eq!(
            Revision::from_header(Header::Absent),
            Revision::WithSessions
        );
        let twice = value(b"2025-11-25");
        assert_eq!(
            Revision::from_header(Header::Several(&twice)),
            Revision::Ambiguous
        );
        assert_eq!(classify(b"2025-03-26"), Revision::WithSessions);
        assert_eq!(classify(b"2025-11-25"), Revision::WithSessions);
        assert_eq!(classify(b"2026-07-28"), Revision::Stateless);
        assert_eq!(classify(b"2031-01-01"), Revision::Stateless);
        for ambiguous in [
            &b"DRAFT-2026-v1"[..],
            b"2026-7-28",
            b"",
            b"\xff",
            b"2025-03-26 ",
        ] {
            assert_eq!(classify(ambiguous), Revision::Ambiguous, "{ambiguous:?}");
        }
    }
}
