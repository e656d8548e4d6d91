//! Common layers, to compare ours with.

use std::time::Duration;

use axum::{
    body::Body,
    middleware::{Next, from_fn},
};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use rmcp::transport::{
    StreamableHttpService, streamable_http_server::session::local::LocalSessionManager,
};
use strum::{Display, EnumIter};
use tower::{Layer, ServiceBuilder};
use tower_http::{
    catch_panic::CatchPanicLayer,
    classify::{ServerErrorsAsFailures, SharedClassifier},
    cors::CorsLayer,
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    timeout::TimeoutLayer,
    trace::{DefaultMakeSpan, DefaultOnRequest, DefaultOnResponse, TraceLayer},
};
use tracing::Level;

use crate::{
    setup::{Server, boxed},
    tools::Tools,
};

/// A widely used layer, or five of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub enum CommonLayer {
    /// `TraceLayer` at `INFO`, without a subscriber.
    Trace,
    /// Like [`Self::Trace`], with a subscriber that formats everything and throws it away.
    TraceHeard,
    Cors,
    /// An axum middleware function that does nothing.
    FromFn,
    /// Sets a request id and copies it to the response.
    RequestId,
    /// Request ids, `Trace`, `Cors`, `CatchPanic` and `Timeout`.
    Five,
}

type Bare = StreamableHttpService<Tools, LocalSessionManager>;

// === impl CommonLayer ===

impl CommonLayer {
    pub fn around(self, service: Bare) -> Server<Full<Bytes>> {
        match self {
            Self::Trace => boxed(trace().layer(service)),
            Self::TraceHeard => {
                let subscriber = tracing_subscriber::fmt().with_writer(std::io::sink);
                // An earlier case may already have set one.
                let _ = subscriber.try_init();
                boxed(trace().layer(service))
            }
            Self::Cors => boxed(CorsLayer::permissive().layer(service)),
            Self::FromFn => {
                let nothing = |request, next: Next| next.run(request);
                let service = from_fn(nothing).layer(service);
                let body = |request: Request<Full<Bytes>>| request.map(Body::new);
                boxed(ServiceBuilder::new().map_request(body).service(service))
            }
            Self::RequestId => boxed(
                ServiceBuilder::new()
                    .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
                    .layer(PropagateRequestIdLayer::x_request_id())
                    .service(service),
            ),
            Self::Five => boxed(
                ServiceBuilder::new()
                    .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
                    .layer(PropagateRequestIdLayer::x_request_id())
                    .layer(trace())
                    .layer(CorsLayer::permissive())
                    .layer(CatchPanicLayer::new())
                    .layer(timeout())
                    .service(service),
            ),
        }
    }
}

fn trace() -> TraceLayer<SharedClassifier<ServerErrorsAsFailures>> {
    TraceLayer::new_for_http()
        .make_span_with(DefaultMakeSpan::new().level(Level::INFO))
        .on_request(DefaultOnRequest::new().level(Level::INFO))
        .on_response(DefaultOnResponse::new().level(Level::INFO))
}

/// Returns a timeout longer than any call takes.
fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(3_600))
}
