//! Makes the server and its clients use the public URL (`--public-url`).
//!
//! 1. The upstream receives `Forwarded` (RFC 7239) and `X-Forwarded-For`, `-Host` and `-Proto`. If a client sends any of these
//!    itself, the proxy strips them, unless the client's address is in `--trust-forwarded`.
//! 2. The public origin is taken from `--public-url` or, if that option is not set, from the headers sent by a trusted address.
//!    If these name a host that is neither in `--allow-host` nor one of this machine's names, `Host` is used instead.
//! 3. In responses, the public origin replaces the upstream's, both in the `resource_metadata` parameter of
//!    `WWW-Authenticate` and in the `resource` field of a protected resource's metadata (RFC 9728). Redirects are rewritten by
//!    `forward`. Everything else is passed through unchanged, including URLs at other origins.

use std::{
    convert::Infallible,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use axum::body::Body;
use futures_util::future::Either;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use tower_service::Service;
use tracing::warn;

use crate::{
    config::Config,
    frontend::RequestFilter,
    headers::{JSON, has_content_coding, has_content_type},
    http_service::{HttpService, ResponseFuture, read_to_end},
    origin::Origin,
};

mod challenge;
mod forwarded;
mod metadata;

use self::forwarded::Forwarded;

/// The path to a protected resource's metadata. The resource's own path may be appended to it.
const METADATA: &str = "/.well-known/oauth-protected-resource";

/// Maximum size of metadata to rewrite.
const MAX_METADATA: usize = 64 * 1024;

/// A service that passes the public URL on to the server and inserts it into responses.
#[derive(Debug, Clone)]
pub(crate) struct PublicUrl<S> {
    inner: S,
    /// `None` if the server is a command, which receives no headers.
    rules: Option<Arc<Rules>>,
}

struct Rules {
    upstream: Origin,
    forwarded: Forwarded,
    /// Whether a warning about metadata has been logged.
    has_warned: AtomicBool,
}

// === impl PublicUrl ===

impl<S> PublicUrl<S> {
    /// Creates the service. `filter` determines which hosts are accepted in `X-Forwarded-Host`.
    pub(crate) fn new(inner: S, config: &Config, filter: RequestFilter) -> Self {
        let upstream = config.upstream.as_ref().and_then(Origin::of);
        let rules = upstream.map(|upstream| {
            Arc::new(Rules {
                upstream,
                forwarded: Forwarded::new(&config.public, filter),
                has_warned: AtomicBool::new(false),
            })
        });
        Self { inner, rules }
    }
}

impl<S: HttpService> Service<Request<Body>> for PublicUrl<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, ResponseFuture>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(rules) = &self.rules else {
            return Either::Left(self.inner.call(request));
        };
        let connection = rules.forwarded.apply(&mut request);
        let public = connection.0.public.clone();
        request.extensions_mut().insert(connection);
        let Some(public) = public else {
            return Either::Left(self.inner.call(request));
        };
        let is_metadata = is_metadata(&request);
        // Compressed metadata would be passed through unchanged.
        if is_metadata {
            let identity = HeaderValue::from_static("identity");
            request
                .headers_mut()
                .insert(header::ACCEPT_ENCODING, identity);
        }
        let (rules, future) = (rules.clone(), self.inner.call(request));
        Either::Right(Box::pin(async move {
            let mut response = future.await?;
            challenge::rewrite(response.headers_mut(), &rules.upstream, &public);
            if is_metadata && response.status() == StatusCode::OK {
                response = rules.rewrite_metadata(response, &public).await;
            }
            Ok(response)
        }))
    }
}

// === impl Rules ===

impl Rules {
    /// Rewrites the `resource` field of the metadata.
    ///
    /// Compressed, oversized or incomplete metadata is passed through unchanged, with a warning.
    async fn rewrite_metadata(&self, response: Response<Body>, public: &Origin) -> Response<Body> {
        if !has_content_type(response.headers(), JSON) {
            return response;
        }
        if has_content_coding(response.headers()) {
            self.warn("compressed");
            return response;
        }
        let (mut head, body) = response.into_parts();
        let body = match read_to_end(body, MAX_METADATA).await {
            Ok(body) => body,
            Err(body) => {
                self.warn("larger than 64 KiB, or incomplete");
                return Response::from_parts(head, body);
            }
        };
        let Some(rewritten) = metadata::rewrite(&body, &self.upstream, public) else {
            return Response::from_parts(head, Body::from(body));
        };
        for name in metadata::BODY_HEADERS {
            head.headers.remove(name);
        }
        head.headers
            .insert(header::CONTENT_LENGTH, rewritten.len().into());
        Response::from_parts(head, Body::from(rewritten))
    }

    /// Warns, once, that metadata is passed through unchanged.
    fn warn(&self, reason: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            warn!(
                "the MCP server's OAuth metadata is passed through unchanged because it is {reason} (--public-url, logged once)"
            );
        }
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

/// Returns `true` if a request is for a protected resource's metadata.
fn is_metadata(request: &Request<Body>) -> bool {
    let rest = request.uri().path().strip_prefix(METADATA);
    let is_metadata_path = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    is_metadata_path && request.method() == Method::GET
}
