//! Exports OpenTelemetry traces over OTLP (feature `otel`).
//!
//! 1. Traces are only exported if `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set, and no variable in
//!    `OFF` turns them off. Otherwise, `traceparent` is passed through unchanged.
//! 2. Each POST becomes a span. Its parent is taken from the request's `traceparent`, and the server receives this span as the
//!    parent of its own.
//! 3. A call's span is named after the call's method and tool. It lasts until the call has ended, even if the client has
//!    disconnected, and records the outcome. The layer's log lines become its events. Headers, parameters and paths are never
//!    recorded.

use std::{
    convert::Infallible,
    env, fmt, io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes, HttpBody};
use futures_util::future::Either;
use http::{Method, Request, Response};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use mcp_cancel_on_disconnect::{Event, Outcome};
use opentelemetry::{
    propagation::TextMapPropagator as _,
    trace::{TraceContextExt as _, TracerProvider as _},
};
use opentelemetry_http::{HeaderExtractor, HeaderInjector, HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::{Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tokio::{runtime::Handle, time::timeout};
use tower_service::Service;
use tracing::{
    Instrument as _, Level, Metadata, Span, Subscriber, field::Empty, info_span,
    instrument::Instrumented, warn,
};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, filter::filter_fn, registry::LookupSpan};

use crate::{http_service::HttpService, message::sanitize};

/// The target for the spans, which are not part of the log.
pub(crate) const TARGET: &str = "mcp_cancel_proxy_trace";

/// The target for the layer's log lines.
const LAYER: &str = "mcp_cancel_on_disconnect";

/// The OpenTelemetry variables that specify the collector.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

/// The OpenTelemetry variables that turn traces off, each with the value to set.
const OFF: [(&str, &str); 2] = [
    ("OTEL_SDK_DISABLED", "true"),
    ("OTEL_TRACES_EXPORTER", "none"),
];

/// How long sending a batch of spans may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// How long sending the last spans may take when the program exits.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum size of a collector's response.
const MAX_RESPONSE: usize = 64 * 1024;

/// Maximum number of bytes to record of a name sent by a client.
const MAX_NAME: usize = 128;

/// Exports spans to a collector.
#[derive(Debug)]
pub(crate) struct Traces(SdkTracerProvider);

/// A service that creates a span for each POST request.
#[derive(Debug, Clone)]
pub(crate) struct Traced<S>(pub(crate) S);

/// A service that reads a request's body within the request's span, in whichever task.
#[derive(Debug, Clone)]
pub(crate) struct TracedBodies<S>(pub(crate) S);

/// A body that is read within a span.
struct TracedBody {
    body: Body,
    span: Span,
}

/// Sends spans on the program's runtime. The exporter calls it from its own thread.
struct Sender {
    client: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    runtime: Handle,
    has_warned: Arc<AtomicBool>,
}

// === impl Traces ===

impl Traces {
    /// Starts exporting spans. Must be called on a runtime.
    ///
    /// Returns `None` if the environment does not specify a collector, or if it turns traces off.
    pub(crate) fn start() -> io::Result<Option<Self>> {
        let is_set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_off = OFF
            .iter()
            .any(|(name, off)| env::var(name).is_ok_and(|value| value.eq_ignore_ascii_case(off)));
        if is_off || !ENDPOINTS.iter().any(is_set) {
            return Ok(None);
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Sender::new()?)
            .build()
            .map_err(io::Error::other)?;
        let mut resource = Resource::builder();
        if !is_set(&"OTEL_SERVICE_NAME") {
            resource = resource.with_service_name(env!("CARGO_PKG_NAME"));
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        Ok(Some(Self(provider)))
    }

    /// Returns the layer that exports the program's spans.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer(env!("CARGO_PKG_NAME")))
            .with_location(false)
            .with_target(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(|metadata| {
                metadata.target() == TARGET || is_layer_line(metadata)
            }))
    }

    /// Sends the last spans, for up to [`END_TIMEOUT`].
    pub(crate) fn end(self) {
        if let Err(error) = self.0.shutdown_with_timeout(END_TIMEOUT) {
            warn!(%error, "the last traces were not sent (OTEL_EXPORTER_OTLP_ENDPOINT)");
        }
    }
}

/// Returns `true` for the layer's log lines, which become events in the span.
fn is_layer_line(metadata: &Metadata<'_>) -> bool {
    metadata.target() == LAYER && metadata.is_event() && *metadata.level() <= Level::DEBUG
}

// === impl Traced ===

impl<S: HttpService> Service<Request<Body>> for Traced<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, Instrumented<S::Future>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if request.method() != Method::POST {
            return Either::Left(self.0.call(request));
        }
        let span = info_span!(
            target: TARGET,
            "POST",
            otel.kind = "server",
            otel.status_code = Empty,
            jsonrpc.request.id = Empty,
            mcp.method.name = Empty,
            gen_ai.tool.name = Empty,
            mcp.call.outcome = Empty,
            error.r#type = Empty,
        );
        if span.is_disabled() {
            return Either::Left(self.0.call(request));
        }
        let propagator = TraceContextPropagator::new();
        let parent = propagator.extract(&HeaderExtractor(request.headers()));
        // Fails only if the span has already started.
        let _ = span.set_parent(parent);
        let mut headers = HeaderInjector(request.headers_mut());
        propagator.inject_context(&span.context(), &mut headers);
        let response_future = span.in_scope(|| self.0.call(request));
        Either::Right(response_future.instrument(span))
    }
}

/// Records what is known about a call in its span. The layer reports a call's events from within that span.
pub(crate) fn observe(event: &Event<'_>) {
    let sanitized = |text: &str| sanitize(text.as_bytes(), MAX_NAME);
    match event {
        Event::Started { call, .. } => {
            let span = Span::current();
            let method = sanitized(call.method());
            let name = match call.tool().map(sanitized) {
                Some(tool) => {
                    span.record("gen_ai.tool.name", &*tool);
                    format!("{method} {tool}")
                }
                None => method.clone(),
            };
            // `tracing` cannot rename a span once it has started, so rename the OpenTelemetry span instead.
            span.context().span().update_name(name);
            span.record("mcp.method.name", method);
            span.record(
                "jsonrpc.request.id",
                sanitized(&call.request_id().to_string()),
            );
        }
        Event::Ended { outcome, .. } => {
            let span = Span::current();
            let (outcome, reason) = match outcome {
                Outcome::Completed => ("completed", None),
                Outcome::Cancelled(reason) => ("cancelled", Some(reason.to_string())),
                Outcome::Abandoned(reason) => ("abandoned", Some(reason.to_string())),
                Outcome::ClientCancelled => ("client_cancelled", None),
                Outcome::Failed => ("failed", Some("failed".to_owned())),
                _ => ("unknown", None),
            };
            span.record("mcp.call.outcome", outcome);
            if let Some(reason) = reason {
                span.record("otel.status_code", "ERROR");
                span.record("error.type", reason);
            }
            // End the span explicitly. Otherwise, a task that holds on to it until the program ends would keep it from being
            // sent.
            span.context().span().end();
        }
        _ => {}
    }
}

// === impl TracedBodies ===

impl<S: HttpService> Service<Request<Body>> for TracedBodies<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let span = Span::current();
        if span.is_none() {
            return self.0.call(request);
        }
        self.0
            .call(request.map(|body| Body::new(TracedBody { body, span })))
    }
}

impl HttpBody for TracedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, span } = self.get_mut();
        span.in_scope(|| Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

// === impl Sender ===

impl Sender {
    fn new() -> io::Result<Self> {
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()?
            .https_or_http()
            .enable_http1()
            .build();
        Ok(Self {
            client: legacy::Client::builder(TokioExecutor::new()).build(connector),
            runtime: Handle::current(),
            has_warned: Arc::default(),
        })
    }
}

impl HttpClient for Sender {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.client.clone();
        let send = async move {
            let (head, body) = client.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_RESPONSE).collect().await?.to_bytes();
            Ok::<_, HttpError>(Response::from_parts(head, body))
        };
        // Use the runtime, because the exporter's thread has no timers.
        let sending = self
            .runtime
            .spawn(async { timeout(SEND_TIMEOUT, send).await });
        let has_warned = self.has_warned.clone();
        Box::pin(async move {
            let sent: Result<Response<Bytes>, HttpError> = match sending.await {
                Ok(Ok(sent)) => sent,
                Ok(Err(late)) => Err(late.into()),
                Err(ended) => Err(ended.into()),
            };
            let is_sent = sent
                .as_ref()
                .is_ok_and(|response| response.status().is_success());
            if !is_sent && !has_warned.swap(true, Ordering::Relaxed) {
                warn!("traces could not be sent to OTEL_EXPORTER_OTLP_ENDPOINT (logged once)");
            }
            sent
        })
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}
