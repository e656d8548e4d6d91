//! The parts of a request that may authenticate its client: header fields, path and query.
//!
//! A server may authenticate by any field: `Authorization`, a key of its own, a cookie, a field of a gateway. So every
//! field counts, except for those of [`HARMLESS`], which do not identify a client, or differ between its requests. Some
//! servers read a key from the path or the query.

use std::{fmt, sync::Arc};

use http::{HeaderName, HeaderValue, Request, Uri, uri::PathAndQuery};
use tokio::time::Instant;

/// Fields that are not credentials.
///
/// They belong to one connection, one body, a browser, a trace, or MCP itself. A field is listed only if no server can be
/// expected to distinguish two clients by it. The session id is listed because sessions are compared elsewhere.
const HARMLESS: [&str; 45] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "b3",
    "baggage",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "dnt",
    "expect",
    "host",
    "keep-alive",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
    "pragma",
    "priority",
    "request-id",
    "sec-ch-ua",
    "sec-ch-ua-mobile",
    "sec-ch-ua-platform",
    "sec-fetch-dest",
    "sec-fetch-mode",
    "sec-fetch-site",
    "sec-fetch-user",
    "sec-gpc",
    "sentry-trace",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "upgrade-insecure-requests",
    "user-agent",
    "x-amzn-trace-id",
    "x-b3-parentspanid",
    "x-b3-sampled",
    "x-b3-spanid",
    "x-b3-traceid",
    "x-cloud-trace-context",
    "x-correlation-id",
    "x-request-id",
];

/// Credentials of a single message: they are compared, and not sent with another message.
const SINGLE_MESSAGE: [&str; 8] = [
    "content-digest",
    "content-md5",
    "digest",
    "idempotency-key",
    "repr-digest",
    "signature",
    "signature-input",
    "x-idempotency-key",
];

/// The credentials of a request: path, query, and all fields but the harmless ones.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    target: Option<PathAndQuery>,
    fields: Box<[(HeaderName, HeaderValue)]>,
}

/// The credentials of a request that is sent to the server.
#[derive(Debug, Clone)]
pub(super) struct SentCredentials {
    pub(super) credentials: Arc<Credentials>,
    /// The approximate size of the head of the request. The credentials may be slices of it.
    pub(super) bytes: usize,
    /// When they were read, just before the request is sent.
    pub(super) at: Instant,
}

/// Returns `true` if a field does not identify the client.
pub(super) fn is_harmless(name: &HeaderName) -> bool {
    HARMLESS.binary_search(&name.as_str()).is_ok()
}

// === impl Credentials ===

impl Credentials {
    /// Returns the credentials of a request.
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        let headers = request.headers();
        let fields = headers.iter().filter(|(name, _)| !is_harmless(name));
        let mut fields: Vec<_> = fields
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        // Only the order of fields with the same name matters.
        fields.sort_by(|one, other| one.0.as_str().cmp(other.0.as_str()));
        Self {
            // Without the authority, which HTTP/2 has in the URL, and HTTP/1 in `Host`.
            target: request.uri().path_and_query().cloned(),
            fields: fields.into(),
        }
    }

    /// Replaces the credentials of a request with these.
    ///
    /// Credentials of a single message are removed and not replaced.
    pub(super) fn put_on<B>(&self, request: &mut Request<B>) {
        let mut parts = request.uri().clone().into_parts();
        parts.path_and_query.clone_from(&self.target);
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
        let headers = request.headers_mut();
        let replaced: Vec<HeaderName> = headers
            .keys()
            .filter(|name| !is_harmless(name))
            .cloned()
            .collect();
        for name in replaced {
            headers.remove(name);
        }
        for (name, value) in &self.fields {
            if !SINGLE_MESSAGE.contains(&name.as_str()) {
                headers.append(name.clone(), value.clone());
            }
        }
    }
}

// === impl SentCredentials ===

impl SentCredentials {
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        Self {
            credentials: Arc::new(Credentials::of(request)),
            bytes: head_size(request),
            at: Instant::now(),
        }
    }
}

/// Returns the approximate size of the head of a request.
fn head_size<B>(request: &Request<B>) -> usize {
    let of_header =
        |(name, value): (&HeaderName, &HeaderValue)| 96 + name.as_str().len() + value.len();
    let headers: usize = request.headers().iter().map(of_header).sum();
    headers
        + size_of::<PathAndQuery>()
        + request.uri().path().len()
        + request.uri().query().map_or(0, str::len)
}

/// Shows neither names nor values, because both may be secret.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({} fields)", self.fields.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::new(());
        for (name, value) in fields {
            let name: HeaderName = name.parse().unwrap();
            request.headers_mut().append(name, value.parse().unwrap());
        }
        request
    }

    fn credentials(fields: &[(&str, &str)]) -> Credentials {
        Credentials::of(&request(fields))
    }

    #[test]
    fn the_harmless_fields_are_sorted() {
        assert!(HARMLESS.is_sorted());
    }

    #[test]
    fn any_field_that_is_not_known_to_be_harmless_is_a_credential() {
        for name in [
            "authorization",
            "x-api-key",
            "cookie",
            "dpop",
            "x-user",
            "x-forwarded-for",
        ] {
            assert_ne!(
                credentials(&[(name, "a")]),
                credentials(&[(name, "b")]),
                "{name}"
            );
            assert_ne!(credentials(&[(name, "a")]), credentials(&[]), "{name}");
            assert_ne!(
                credentials(&[(name, "a")]),
                credentials(&[(name, "a"), (name, "b")]),
                "{name}"
            );
        }
        let post = credentials(&[("cookie", "a"), ("accept", "*/*"), ("x-key", "b")]);
        assert_eq!(
            post,
            credentials(&[("x-key", "b"), ("traceparent", "1"), ("cookie", "a")])
        );
    }

    #[test]
    fn credentials_replace_those_of_a_request_and_nothing_else() {
        let mut target = request(&[("cookie", "old"), ("accept", "*/*")]);
        let mut source = request(&[("x-key", "new"), ("signature", "of another message")]);
        *source.uri_mut() = Uri::from_static("/mcp?key=new");
        Credentials::of(&source).put_on(&mut target);
        assert_eq!(target.uri(), "/mcp?key=new");
        let fields: Vec<_> = target
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        assert_eq!(fields, [("accept", "*/*"), ("x-key", "new")]);
    }
}
