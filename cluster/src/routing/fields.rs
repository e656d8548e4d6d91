//! The header fields that decide where a request is routed.
//!
//! They are read in a single pass, which is cheaper than looking up each field.

use http::{HeaderMap, HeaderName};

use crate::relay::wire;

/// The header field containing the session id.
pub(crate) static SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");

/// [`SESSION_ID`] without its `mcp-` prefix.
const SESSION_ID_SUFFIX: &str = "session-id";

/// The fields that decide where a request is routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fields<'a> {
    /// The session id, if readable and non-empty. If the field is repeated, only the first occurrence is used, as in rmcp.
    pub(crate) session: Option<&'a str>,
    /// Whether there are fields that only peers may set.
    pub(crate) has_internal: bool,
}

// === impl Fields ===

impl<'a> Fields<'a> {
    pub(crate) fn parse(headers: &'a HeaderMap) -> Self {
        let mut has_internal = false;
        let mut session_id = None;
        for (name, value) in headers {
            // A single comparison rules out nearly all names.
            let Some(name) = name.as_str().strip_prefix("mcp-") else {
                continue;
            };
            if name == SESSION_ID_SUFFIX {
                session_id = session_id.or(Some(value));
            } else {
                has_internal |= wire::is_internal(name);
            }
        }
        let session = session_id.and_then(|value| value.to_str().ok());
        Self {
            session: session.filter(|id| !id.is_empty()),
            has_internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn fields(named: &[(&'static str, &[u8])]) -> (Option<String>, bool) {
        let named = named.iter().map(|(name, value)| {
            let value = HeaderValue::from_bytes(value).unwrap();
            (HeaderName::from_static(name), value)
        });
        let headers: HeaderMap = named.collect();
        let fields = Fields::parse(&headers);
        (fields.session.map(str::to_owned), fields.has_internal)
    }

    #[test]
    fn a_session_that_can_be_read_is_found() {
        let (session, has_internal) = fields(&[("accept", b"*/*"), ("mcp-session-id", b"a b")]);
        assert_eq!((session.as_deref(), has_internal), (Some("a b"), false));
        for without_session in [
            &[][..],
            &[("mcp-session-id", &b""[..])],
            &[("mcp-session-id", b"\xff")],
            &[("mcp-session-id", b""), ("mcp-session-id", b"a")],
            &[("mcp-session-id", b"\xff"), ("mcp-session-id", b"a")],
            &[("mcp-session", b"a"), ("mcp-session-ids", b"a")],
        ] {
            assert_eq!(
                fields(without_session),
                (None, false),
                "{without_session:?}"
            );
        }
        for second in [b"a", b"b"] {
            let (session, _) = fields(&[("mcp-session-id", b"a"), ("mcp-session-id", second)]);
            assert_eq!(session.as_deref(), Some("a"));
        }
    }

    #[test]
    fn fields_that_only_peers_may_send_are_detected() {
        for name in ["mcp-cluster", "mcp-cluster-client"] {
            assert!(fields(&[("mcp-session-id", b"a"), (name, b"")]).1);
        }
        assert!(!fields(&[("mcp-clusters", b"")]).1);
    }
}
