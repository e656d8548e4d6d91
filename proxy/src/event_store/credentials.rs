//! The parts of a request that may authenticate its client: header fields, path and query.
//!
//! A server may authenticate clients by any field: `Authorization`, a custom field for an API key, a cookie, or a field added
//! by a gateway. So every field is a credential, except for those in [`HARMLESS`], which either don't identify a client or vary
//! between its requests. The path and the query are credentials too, because some servers read a key from them.

use std::{fmt, sync::Arc};

use http::{HeaderName, HeaderValue, Request, Uri, uri::PathAndQuery};
use tokio::time::Instant;

/// Fields that are not credentials.
///
/// They relate to a single connection, a single body, a browser, a trace, or MCP itself. A field is only listed if no server is
/// likely to tell clients apart by it. The session id is an exception: it is listed because sessions are compared elsewhere.
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

/// Credentials specific to a single message. They are compared, but never sent with another message.
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

/// A request's credentials: its path, its query, and all fields except the harmless ones.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    target: Option<PathAndQuery>,
    fields: Box<[(HeaderName, HeaderValue)]>,
}

/// The credentials of a request being sent to the server.
#[derive(Debug, Clone)]
pub(super) struct SentCredentials {
    pub(super) credentials: Arc<Credentials>,
    /// The approximate size of the request head, whose buffer the credentials may share.
    pub(super) bytes: usize,
    /// When the credentials were extracted, just before the request was sent.
    pub(super) extracted_at: Instant,
}

/// Returns `true` if the field is not a credential.
pub(super) fn is_harmless(name: &HeaderName) -> bool {
    HARMLESS.binary_search(&name.as_str()).is_ok()
}

// === impl Credentials ===

impl Credentials {
    /// Extracts a request's credentials.
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        let headers = request.headers();
        let fields = headers.iter().filter(|(name, _)| !is_harmless(name));
        let mut fields: Vec<_> = fields
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        // Only the relative order of fields with the same name matters, and a stable sort preserves it.
        fields.sort_by(|a, b| a.0.as_str().cmp(b.0.as_str()));
        Self {
            // Leave out the authority, which HTTP/2 carries in the URL but HTTP/1 in `Host`.
            target: request.uri().path_and_query().cloned(),
            fields: fields.into(),
        }
    }

    /// Replaces a request's own credentials with these.
    ///
    /// Credentials specific to a single message are removed without replacement.
    pub(super) fn apply_to<B>(&self, request: &mut Request<B>) {
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
            extracted_at: Instant::now(),
        }
    }
}

/// Returns the approximate size of a request head.
fn head_size<B>(request: &Request<B>) -> usize {
    let header_size =
        |(name, value): (&HeaderName, &HeaderValue)| 96 + name.as_str().len() + value.len();
    let headers: usize = request.headers().iter().map(header_size).sum();
    headers
        + size_of::<PathAndQuery>()
        + request.uri().path().len()
        + request.uri().query().map_or(0, str::len)
}

/// Omits the names and values of the fields, because both may be secret.
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
    fn only_the_credentials_of_a_request_are_replaced() {
        let mut target = request(&[("cookie", "old"), ("accept", "*/*")]);
        let mut source = request(&[("x-key", "new"), ("signature", "of another message")]);
        *source.uri_mut() = Uri::from_static("/mcp?key=new");
        Credentials::of(&source).apply_to(&mut target);
        assert_eq!(target.uri(), "/mcp?key=new");
        let fields: Vec<_> = target
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        assert_eq!(fields, [("accept", "*/*"), ("x-key", "new")]);
    }
}
