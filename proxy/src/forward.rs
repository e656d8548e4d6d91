//! Forwards requests to an MCP server over HTTP, and its responses back, as raw bytes.
//!
//! 1. Only configured targets are served: the endpoint, paths below it, and `/.well-known/` at its origin, where clients look for
//!    the server's authorization metadata. No request can choose another host.
//! 2. Bodies, paths, statuses and headers are passed through unchanged, except for hop-by-hop headers, `Expect`, the configured
//!    headers, and those set by `public_url`. `Host` is replaced by the server's own, because the server may check it. Event
//!    streams are requested without a content coding, because the proxy has to parse them to find the answer to a call.
//! 3. If the server can't be reached or does not respond, the client gets a 502 with a JSON-RPC error.
//! 4. If the endpoint redirects, the redirect is either rewritten to point back at the proxy or replaced with a 502, so that no
//!    client bypasses the proxy.
//! 5. If a response is dropped before it is complete, its connection to the server is closed.

use std::{
    convert::Infallible,
    error::Error,
    fmt, io,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header,
    response,
    uri::{Authority, PathAndQuery, Scheme},
};
use hyper_util::client::legacy;
use tower_service::Service;
use tracing::warn;

use self::{
    client::Client,
    redirect::Redirect,
    replayable_body::{ReplayableBody, Returned},
};
use crate::{
    headers::{EVENT_STREAM, accepts},
    http_service::ResponseFuture,
    message::{Kind, Message},
    origin::{ClientConnection, Origin},
    refusal::{self, SERVER_ERROR},
};

mod client;
mod redirect;
mod replayable_body;
mod small_reads;

/// Path prefix for metadata about an origin, such as its authorization metadata (RFC 8615).
const WELL_KNOWN: &str = "/.well-known/";

/// Hop-by-hop headers, in addition to those listed in `Connection`.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// A server that speaks HTTP, as an [`HttpService`](crate::http_service::HttpService).
#[derive(Clone)]
pub struct Forward(Arc<Upstream>);

/// State shared by all clones of a [`Forward`].
struct Upstream {
    client: Client,
    scheme: Scheme,
    authority: Authority,
    host: HeaderValue,
    endpoint: PathAndQuery,
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// Where a response redirects to.
enum Redirected {
    /// The response is not a redirect, or is passed through unchanged.
    Unchanged,
    /// To the proxy. `Location` has been rewritten.
    ToProxy,
    /// To a target that the proxy does not serve, such as one at another origin.
    External,
}

/// The reason an upstream is invalid.
#[derive(Debug)]
#[non_exhaustive]
pub enum UpstreamError {
    /// The URL has no scheme or no host.
    NotAbsolute,
    /// The system's root certificates can't be loaded.
    Certificates(io::Error),
}

// === impl Forward ===

impl Forward {
    /// Creates the service for a server. `headers` are sent with every request.
    pub fn new(
        upstream: &Uri,
        headers: Vec<(HeaderName, HeaderValue)>,
    ) -> Result<Self, UpstreamError> {
        let parts = upstream.clone().into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(UpstreamError::NotAbsolute);
        };
        let host = HeaderValue::try_from(authority.as_str());
        let host = host.map_err(|_| UpstreamError::NotAbsolute)?;
        let client = Client::new(scheme == Scheme::HTTPS).map_err(UpstreamError::Certificates)?;
        Ok(Self(Arc::new(Upstream {
            client,
            scheme,
            authority,
            host,
            endpoint: parts
                .path_and_query
                .unwrap_or(PathAndQuery::from_static("/")),
            headers,
        })))
    }

    /// Opens a TCP connection to the server, without TLS, and closes it again.
    pub async fn connect(&self, timeout: Duration) -> io::Result<()> {
        client::connect(&self.0.scheme, &self.0.authority, timeout).await
    }

    /// Returns the endpoint's path.
    pub fn path(&self) -> &str {
        self.0.endpoint.path()
    }
}

impl Service<Request<Body>> for Forward {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        let upstream = self.0.clone();
        Box::pin(async move { Ok(upstream.send(request).await) })
    }
}

/// Formats the URL without its query, which may be a secret.
impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Upstream {
            scheme, authority, ..
        } = &*self.0;
        write!(f, "{scheme}://{authority}{}", self.path())
    }
}

impl fmt::Debug for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forward")
            .field("authority", &self.0.authority)
            .field("path", &self.path())
            .finish_non_exhaustive()
    }
}

// === impl Upstream ===

impl Upstream {
    /// Sends a request to the server and returns its response, or an error from the proxy itself.
    ///
    /// The error is a 404 for a path that is not forwarded, a refusal if the request's body can't be read, and a 502 otherwise.
    async fn send(&self, request: Request<Body>) -> Response<Body> {
        let Some(uri) = self.target(request.uri()) else {
            return refusal::plain(
                StatusCode::NOT_FOUND,
                "the MCP server is not at this path\n",
            );
        };
        let (mut parts, body) = request.into_parts();
        let (body, returned) = ReplayableBody::new(body);
        parts.uri = uri.clone();
        parts.version = Version::HTTP_11;
        let connection = parts.extensions.remove::<ClientConnection>();
        // Extensions are only meant for this process, and hyper would keep them alive along with the request.
        parts.extensions.clear();
        remove_hop_by_hop(&mut parts.headers);
        parts.headers.remove(header::EXPECT);
        parts.headers.insert(header::HOST, self.host.clone());
        if accepts(&parts.headers, EVENT_STREAM) {
            let identity = HeaderValue::from_static("identity");
            parts.headers.insert(header::ACCEPT_ENCODING, identity);
        }
        if let Some(connection) = &connection {
            for (name, value) in &connection.0.headers {
                parts.headers.insert(name, value.clone());
            }
        }
        for (name, _) in &self.headers {
            parts.headers.remove(name);
        }
        for (name, value) in &self.headers {
            parts.headers.append(name, value.clone());
        }
        let public = connection
            .as_ref()
            .and_then(|connection| connection.0.public.as_ref());
        match self.client.request(Request::from_parts(parts, body)).await {
            Ok(response) => {
                let (mut head, body) = response.into_parts();
                remove_hop_by_hop(&mut head.headers);
                head.version = Version::default();
                match self.rewrite_redirect(&uri, public, &mut head) {
                    Redirected::Unchanged => Response::from_parts(head, Body::new(body)),
                    Redirected::ToProxy => Response::from_parts(head, Body::empty()),
                    Redirected::External => self.refuse_external_redirect(returned).await,
                }
            }
            Err(error) => self.error_response(&error, returned).await,
        }
    }

    /// Rewrites the `Location` of a redirect to a target that the proxy serves.
    fn rewrite_redirect(
        &self,
        requested: &Uri,
        public: Option<&Origin>,
        head: &mut response::Parts,
    ) -> Redirected {
        let Some(redirect) = Redirect::from_head(head) else {
            return Redirected::Unchanged;
        };
        let Some(path) = redirect.path_at_origin(requested, public) else {
            // Authorization metadata may be on another server, which clients then contact directly.
            return if self.serves_endpoint(requested.path()) {
                Redirected::External
            } else {
                Redirected::Unchanged
            };
        };
        let Some(location) = self.location(&path) else {
            return Redirected::External;
        };
        let original = head.headers.insert(header::LOCATION, location);
        if self.endpoint.query().is_none()
            && original.as_ref() == head.headers.get(header::LOCATION)
        {
            return Redirected::Unchanged;
        }
        // Remove headers describing the dropped body, and any that might repeat the address with the configured query.
        for name in [
            header::CONTENT_LENGTH,
            header::CONTENT_LOCATION,
            header::CONTENT_TYPE,
            header::LINK,
            header::REFRESH,
        ] {
            head.headers.remove(name);
        }
        Redirected::ToProxy
    }

    /// Returns the `Location` at which clients reach a path on the server's origin.
    ///
    /// This does not include the configured query, which [`target`](Self::target) adds to the next request anyway. Returns
    /// `None` if the proxy does not serve the path, or if the result would still contain a value from the configured query.
    fn location(&self, target: &PathAndQuery) -> Option<HeaderValue> {
        let path = self.forwarded_path(target.path())?;
        let query = match (self.endpoint.query(), target.query()) {
            (Some(configured), Some(query)) => redirect::remove_parameters(query, configured),
            (_, query) => query.map(str::to_owned),
        };
        let text = match query {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        let configured = self.endpoint.query();
        if configured.is_some_and(|configured| redirect::contains_value_of(&text, configured)) {
            return None;
        }
        text.parse().ok()
    }

    async fn refuse_external_redirect(&self, returned: Returned) -> Response<Body> {
        let message =
            "the MCP server behind this proxy redirects to another origin (set --upstream to it)";
        warn!(upstream = %self.authority, "{message}");
        let request = returned.request().await;
        refusal::error(
            StatusCode::BAD_GATEWAY,
            request_id(&request),
            SERVER_ERROR,
            message,
        )
    }

    /// Returns the response to a failed request: a refusal if its body can't be read, or else 502.
    async fn error_response(&self, error: &legacy::Error, returned: Returned) -> Response<Body> {
        if let Some(refused) = refusal::for_body_error(error) {
            return refused;
        }
        let cause = root_cause(error);
        let message = if error.is_connect() {
            "the MCP server behind this proxy is unreachable (--upstream)"
        } else if is_head_too_large(error) {
            "the MCP server behind this proxy responded with more than 100 header fields, or with a larger head than this proxy accepts"
        } else {
            "the MCP server behind this proxy did not respond"
        };
        warn!(upstream = %self.authority, error = %cause, "{message}");
        let request = returned.request().await;
        let id = request_id(&request);
        refusal::error(StatusCode::BAD_GATEWAY, id, SERVER_ERROR, message)
    }

    /// Returns the target of a request to `requested`, or `None` if it must not be forwarded.
    fn target(&self, requested: &Uri) -> Option<Uri> {
        let path = self.forwarded_path(requested.path())?;
        // Ignore a trailing slash, because a server may redirect between the paths with and without it.
        let is_endpoint = path.trim_end_matches('/') == self.endpoint.path().trim_end_matches('/');
        let configured = self.endpoint.query().filter(|_| is_endpoint);
        let query = match (configured, requested.query()) {
            (Some(configured), Some(requested)) => format!("?{configured}&{requested}"),
            (Some(query), None) | (None, Some(query)) => format!("?{query}"),
            (None, None) => String::new(),
        };
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(format!("{path}{query}"))
            .build()
            .ok()
    }

    /// Returns the path, or `None` if requests to it must not be forwarded.
    fn forwarded_path<'a>(&self, path: &'a str) -> Option<&'a str> {
        if !self.serves_endpoint(path) && !path.starts_with(WELL_KNOWN) {
            return None;
        }
        // Servers differ in how they resolve `..`, so a path containing it might escape the endpoint.
        let may_have_parent_segment = path.to_ascii_lowercase().replace("%2e", ".").contains("..");
        (!may_have_parent_segment).then_some(path)
    }

    /// Returns `true` if a path is the endpoint's or below it, and not the origin's metadata.
    fn serves_endpoint(&self, path: &str) -> bool {
        let endpoint = self.endpoint.path();
        let is_metadata = path.starts_with(WELL_KNOWN) && !endpoint.starts_with(WELL_KNOWN);
        is_below(endpoint, path) && !is_metadata
    }
}

/// Returns a request's id as it was written, or `None` if it is absent or ambiguous.
fn request_id(text: &[u8]) -> Option<&str> {
    let message = Message::read(text)?;
    message.id.filter(|_| message.kind == Kind::Request)
}

/// Returns `true` if a path is the endpoint's path or lies below it.
fn is_below(endpoint: &str, path: &str) -> bool {
    let rest = path.strip_prefix(endpoint.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // A length has no meaning alongside a transfer coding (RFC 9112, section 6.3), which is removed below.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Returns `true` if the response head was too large for the HTTP client.
///
/// The client accepts up to 100 fields, provided that the head fits into its buffer.
fn is_head_too_large(error: &legacy::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<hyper::Error>())
        .any(hyper::Error::is_parse_too_large)
}

fn causes(error: &legacy::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |error| {
        (*error).source()
    })
}

/// Returns the text of an error's root cause.
pub(crate) fn root_cause(error: &legacy::Error) -> String {
    causes(error)
        .last()
        .map(ToString::to_string)
        .unwrap_or_default()
}

// === impl UpstreamError ===

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAbsolute => {
                f.write_str("the upstream must be a URL such as http://127.0.0.1:9000/mcp")
            }
            Self::Certificates(error) => {
                write!(f, "cannot read this machine's certificates: {error}")
            }
        }
    }
}

impl Error for UpstreamError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_id_of_its_request_byte_for_byte() {
        for id in [
            "1",
            "1.0",
            "\"\\u0061\"",
            "123456789012345678901234567890",
            "-0",
        ] {
            let request = format!(r#" {{"method":"tools/call","id":{id},"params":[]}}"#);
            assert_eq!(request_id(request.as_bytes()), Some(id));
        }
    }

    #[test]
    fn an_error_has_no_id_if_the_id_of_the_request_is_ambiguous() {
        for request in [
            "",
            "{",
            "nonsense",
            r#"{"method":"notifications/progress"}"#,
            r#"{"id":1}"#,
            r#"{"id":1,"result":{}}"#,
            r#"{"id":1,"id":2,"method":"ping"}"#,
            r#"[1,"ping"]"#,
            r#"[{"id":1,"method":"ping"}]"#,
        ] {
            assert_eq!(request_id(request.as_bytes()), None, "{request}");
        }
    }
}
