//! Adds CORS headers for pages from allowed origins (`--allow-origin`).
//!
//! This layer treats every `OPTIONS` request as a preflight request and responds to it itself. In all other responses, whether
//! sent by the cancellation layer or by the server, it replaces the server's CORS headers (as defined in the [Fetch standard])
//! with its own. The server's `Access-Control-Allow-Credentials` is stripped. A server that allows the origin `*` can safely
//! send it, because browsers then ignore it. But this layer allows the page's own origin, so the header would let the page send
//! cookies.
//!
//! [Fetch standard]: https://fetch.spec.whatwg.org/#http-cors-protocol

use std::{
    convert::Infallible,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use futures_util::{TryFutureExt as _, future::MapOk};
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri, header, request::Parts};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tower_service::Service;

use crate::{config::normal_origin, headers::SESSION_ID, http_service::HttpService};

/// How long a browser may cache the response to a preflight request. Chromium caps this at 2 h.
const MAX_AGE: Duration = Duration::from_secs(10 * 60);

/// The HTTP methods that MCP uses.
const METHODS: [Method; 3] = [Method::GET, Method::POST, Method::DELETE];

/// The response headers that pages may read in addition to the CORS-safelisted ones.
const EXPOSED_HEADERS: [HeaderName; 3] =
    [SESSION_ID, header::WWW_AUTHENTICATE, header::RETRY_AFTER];

/// The CORS headers in every response except those to preflight requests.
const RESPONSE_HEADERS: [HeaderName; 3] = [
    header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
    header::ACCESS_CONTROL_ALLOW_ORIGIN,
    header::ACCESS_CONTROL_EXPOSE_HEADERS,
];

/// Strips the CORS headers from the inner service's responses.
#[derive(Debug, Clone)]
pub(crate) struct StripCors<S>(pub(crate) S);

/// Returns the layer that adds CORS headers for pages from `origins`, if there are any.
///
/// The pages may send any header, because servers can define their own.
pub(crate) fn layer(origins: Vec<String>) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let is_allowed = move |origin: &HeaderValue, _: &Parts| {
        let origin = origin.to_str().ok().and_then(|origin| origin.parse().ok());
        origin.is_some_and(|origin: Uri| origins.contains(&normal_origin(&origin)))
    };
    let layer = CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(is_allowed))
        .allow_methods(METHODS)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS)
        .max_age(MAX_AGE);
    Some(layer)
}

// === impl StripCors ===

impl<S: HttpService> Service<Request<Body>> for StripCors<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = MapOk<S::Future, fn(Response<Body>) -> Response<Body>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.call(request).map_ok(|mut response| {
            for name in &RESPONSE_HEADERS {
                response.headers_mut().remove(name);
            }
            response
        })
    }
}
