//! What the request headers say about whose calls these are.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::registry::{Scope, SessionKey};

static SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
static PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The first revision without sessions: closing the response stream is the cancellation.
const FIRST_STATELESS: &str = "2026-07-28";

/// The session header of a request.
#[derive(Debug, Clone)]
pub(super) enum Session {
    None,
    One(HeaderValue),
    /// More than one, or not visible ASCII: whose call it is cannot be said.
    Doubtful,
}

/// The protocol revision in the request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Revision {
    WithSessions,
    Stateless,
    /// Not a revision date.
    Doubtful,
}

// === impl Session ===

impl Session {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(&SESSION_ID).iter();
        match (values.next(), values.next()) {
            (None, _) => Self::None,
            (Some(id), None) if !id.is_empty() && id.to_str().is_ok() => Self::One(id.clone()),
            _ => Self::Doubtful,
        }
    }

    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(super) fn id(&self) -> Option<&str> {
        match self {
            Self::One(id) => id.to_str().ok(),
            _ => None,
        }
    }

    /// The session, in the scope that gave it its id.
    pub(super) fn key(&self, scope: impl FnOnce() -> Scope) -> Option<SessionKey> {
        Some(SessionKey {
            id: self.id()?.into(),
            scope: scope(),
        })
    }
}

// === impl Revision ===

impl Revision {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(&PROTOCOL_VERSION).iter();
        match (values.next(), values.next()) {
            (None, _) => Self::WithSessions,
            (Some(version), None) => version.to_str().map_or(Self::Doubtful, Self::from_version),
            _ => Self::Doubtful,
        }
    }

    /// Revisions are named by their ISO 8601 date, so the order of the text is the order in time.
    pub(super) fn from_version(version: &str) -> Self {
        let is_date = version.len() == FIRST_STATELESS.len()
            && version.bytes().enumerate().all(|(i, byte)| match i {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        match is_date {
            false => Self::Doubtful,
            true if version < FIRST_STATELESS => Self::WithSessions,
            true => Self::Stateless,
        }
    }

    /// What the header and the body say together.
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Stateless, _) | (_, Self::Stateless) => Self::Stateless,
            (Self::Doubtful, _) | (_, Self::Doubtful) => Self::Doubtful,
            _ => Self::WithSessions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static [u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn exactly_one_readable_session_header_names_a_session() {
        let one = headers(&[("mcp-session-id", b"abc")]);
        assert!(matches!(Session::of(&one), Session::One(id) if id == "abc"));
        assert!(matches!(Session::of(&HeaderMap::new()), Session::None));
        for doubtful in [
            headers(&[("mcp-session-id", b"abc"), ("mcp-session-id", b"abc")]),
            headers(&[("mcp-session-id", b"")]),
            headers(&[("mcp-session-id", b"\xff")]),
        ] {
            assert!(matches!(Session::of(&doubtful), Session::Doubtful));
        }
    }

    #[test]
    fn revisions_are_ordered_by_their_date() {
        let of = |version| Revision::of(&headers(&[("mcp-protocol-version", version)]));
        assert_eq!(Revision::of(&HeaderMap::new()), Revision::WithSessions);
        assert_eq!(of(b"2025-03-26"), Revision::WithSessions);
        assert_eq!(of(b"2025-11-25"), Revision::WithSessions);
        assert_eq!(of(b"2026-07-28"), Revision::Stateless);
        assert_eq!(of(b"2031-01-01"), Revision::Stateless);
        for doubtful in [
            &b"DRAFT-2026-v1"[..],
            b"2026-7-28",
            b"",
            b"\xff",
            b"2025-03-26 ",
        ] {
            assert_eq!(of(doubtful), Revision::Doubtful, "{doubtful:?}");
        }
    }
}
