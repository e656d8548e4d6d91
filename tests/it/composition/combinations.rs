//! Common middleware on each side of the layer, with each kind of server and HTTP version.
//!
//! The middleware is everything that servers commonly use. Each combination is one cell in a table, and each covers
//! everything that can happen to a call.
//!
//! `cargo test` runs a sample, which can be repeated with `TEST_SEED`. `COMBINATIONS=all` runs all cells, and
//! `COMBINATIONS=TEXT` runs those whose name contains the text.

use std::{env, fmt, panic::AssertUnwindSafe, time::Duration};

use axum::{
    BoxError, Router,
    body::{Body, Bytes, to_bytes},
    error_handling::HandleErrorLayer,
    extract::Request as HttpRequest,
    http::{Extensions, HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header},
    middleware::{Next, from_fn, map_request, map_response},
    response::{IntoResponse as _, Response},
};
use futures_util::{FutureExt as _, StreamExt as _, future, stream};
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome};
use serde_json::{Value, json};
use tower::{
    ServiceBuilder,
    buffer::BufferLayer,
    filter::FilterLayer,
    limit::{ConcurrencyLimitLayer, RateLimitLayer},
    load_shed::LoadShedLayer,
    retry::{Policy, RetryLayer},
    util::option_layer,
};
use tower_http::{
    catch_panic::CatchPanicLayer,
    compression::CompressionLayer,
    cors::CorsLayer,
    decompression::{DecompressionLayer, RequestDecompressionLayer},
    follow_redirect::FollowRedirectLayer,
    limit::RequestBodyLimitLayer,
    normalize_path::NormalizePathLayer,
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    sensitive_headers::SetSensitiveHeadersLayer,
    set_header::SetResponseHeaderLayer,
    timeout::{ResponseBodyTimeoutLayer, TimeoutLayer},
    trace::TraceLayer,
};

use crate::{
    setup::{Plan, Server, Setup, arguments},
    support::*,
};

/// The number of cells that `cargo test` runs.
const SAMPLE: usize = 240;

/// The number of cells that run at the same time.
const CONCURRENCY: usize = 8;

/// Longer than any cell takes.
const LONG_GRACE: Duration = Duration::from_secs(3_600);

/// Shorter than any client needs to resume.
const SHORT: Duration = Duration::from_millis(30);

/// The manual page that lists what is not supported.
const MANUAL: &str = include_str!("../../../src/manual/deploying.md");

#[derive(Clone, Copy)]
struct Cell {
    middleware: &'static Middleware,
    side: Side,
    server: Server,
    http: Http,
    scenario: Scenario,
}

struct Middleware {
    name: &'static str,
    wrap: fn(Router) -> Router,
    trait_of: Trait,
}

/// A property of some middleware that changes what is expected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trait {
    None,
    /// The layer cannot read what it sends.
    Compresses,
    /// It holds back the whole response until the response has ended.
    HoldsResponses,
    /// It sends a request twice.
    Repeats,
    /// It answers every call itself.
    Answers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Inside,
    Outside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Http {
    One,
    Two,
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scenario {
    Completes,
    Disconnects,
    ResumesInTime,
    ResumesLate,
    Cancels,
    Deletes,
    Drains,
}

use Scenario::{Cancels, Completes, Deletes, Disconnects, Drains, ResumesInTime, ResumesLate};

/// One request on its own connection.
enum Exchange {
    One(Connection),
    Two(H2, H2Stream),
}

// === The table ===

macro_rules! middlewares {
    ($($name:ident $($trait_of:ident)?: $wrap:expr;)+) => {
        static MIDDLEWARES: &[Middleware] = &[$(Middleware {
            name: stringify!($name),
            wrap: $wrap,
            trait_of: middlewares!(@ $($trait_of)?),
        }),+];
    };
    (@) => { Trait::None };
    (@ $trait_of:ident) => { Trait::$trait_of };
}

middlewares! {
    nothing: |app| app;
    timeout: |app| app.layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG_GRACE));
    body_timeout: |app| app.layer(ResponseBodyTimeoutLayer::new(LONG_GRACE));
    retry: |app| app.layer(RetryLayer::new(Once));
    buffer: |app| app.layer(fallible(BufferLayer::new(8)));
    load_shed: |app| app.layer(fallible(LoadShedLayer::new()));
    concurrency_limit: |app| app.layer(ConcurrencyLimitLayer::new(8));
    rate_limit: |app| app.layer(
        ServiceBuilder::new()
            .layer(fallible(BufferLayer::new(8)))
            .layer(RateLimitLayer::new(1_000, Duration::from_secs(1))),
    );
    filter: |app| app.layer(fallible(FilterLayer::new(Ok::<HttpRequest, BoxError>)));
    map_request_body: |app| app.layer(map_request(async |request: HttpRequest| request.map(Body::new)));
    map_response_body: |app| app.layer(map_response(async |response: Response| response.map(Body::new)));
    compression Compresses: |app| app.layer(CompressionLayer::new().compress_when(everything));
    decompression: |app| app.layer(DecompressionLayer::new());
    request_decompression: |app| app
        .layer(map_request(async |request: HttpRequest| request.map(Body::new)))
        .layer(RequestDecompressionLayer::new());
    trace: |app| app.layer(TraceLayer::new_for_http());
    cors: |app| app.layer(CorsLayer::permissive());
    catch_panic: |app| app.layer(CatchPanicLayer::new());
    request_id: |app| app
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid));
    sensitive_headers: |app| app.layer(SetSensitiveHeadersLayer::new([
        header::AUTHORIZATION,
        HeaderName::from_static("mcp-session-id"),
    ]));
    set_header: |app| app.layer(SetResponseHeaderLayer::overriding(
        header::SERVER,
        HeaderValue::from_static("a server"),
    ));
    limit_body: |app| app.layer(RequestBodyLimitLayer::new(64 * 1024));
    normalize_path: |app| app.layer(NormalizePathLayer::trim_trailing_slash());
    follow_redirect: |app| app.layer(FollowRedirectLayer::new());
    option_layer_some: |app| app.layer(option_layer(Some(ConcurrencyLimitLayer::new(8))));
    option_layer_none: |app| app.layer(option_layer(None::<ConcurrencyLimitLayer>));
    buffers_requests: |app| app.layer(from_fn(buffer_request));
    delays_frames: |app| app.layer(map_response(delay_frames));
    holds_responses HoldsResponses: |app| app.layer(map_response(hold_response));
    drops_the_first_response Repeats: |app| app.layer(from_fn(drop_first_response));
    answers_itself Answers: |app| app.layer(from_fn(answer_call));
}

const SERVERS: [Server; 4] = [
    Server::Wrapped,
    Server::LayerOnly,
    Server::StatelessSse,
    Server::StatelessJson,
];

const SCENARIOS: [Scenario; 7] = [
    Completes,
    Disconnects,
    ResumesInTime,
    ResumesLate,
    Cancels,
    Deletes,
    Drains,
];

fn table() -> Vec<Cell> {
    let mut cells = Vec::new();
    for middleware in MIDDLEWARES {
        for side in [Side::Inside, Side::Outside] {
            for server in SERVERS {
                for http in [Http::One, Http::Two] {
                    cells.extend(SCENARIOS.map(|scenario| Cell {
                        middleware,
                        side,
                        server,
                        http,
                        scenario,
                    }));
                }
            }
        }
    }
    cells
}

// === impl Cell ===

impl Cell {
    /// Returns why the cell has no expectation, if it has none.
    ///
    /// Either the combination makes no sense, or it is not supported and the manual contains these words.
    fn unsupported_reason(self) -> Option<&'static str> {
        let without_session = !self.server.has_sessions();
        if without_session
            && matches!(
                self.scenario,
                ResumesInTime | ResumesLate | Cancels | Deletes
            )
        {
            return Some("there is no session");
        }
        let is_away = matches!(self.scenario, Disconnects | ResumesInTime | ResumesLate);
        match self.middleware.trait_of {
            Trait::Compresses
                if self.side == Side::Inside && self.server != Server::Wrapped && is_away =>
            {
                Some("compression of event streams, without the session manager")
            }
            Trait::HoldsResponses if matches!(self.scenario, ResumesInTime | ResumesLate) => {
                Some("something that holds back a whole response")
            }
            // With an immediate grace period, the first attempt is cancelled before the second one arrives.
            Trait::Repeats if self.scenario == Completes && without_session => None,
            Trait::Repeats
                if self.server != Server::Wrapped
                    || self.side == Side::Outside
                    || self.scenario == Disconnects =>
            {
                Some("something that sends a request twice")
            }
            Trait::Answers if self.scenario != Completes => Some("the call is over at once"),
            _ => None,
        }
    }

    /// Returns `true` if the head is sent before the answer.
    fn has_early_head(self) -> bool {
        self.server != Server::StatelessJson && self.middleware.trait_of != Trait::HoldsResponses
    }

    async fn start(self) -> Setup {
        let wrap = self.middleware.wrap;
        let is_repeated = self.middleware.trait_of == Trait::Repeats;
        let grace = match self.scenario {
            ResumesInTime => Grace::After(LONG_GRACE),
            ResumesLate => Grace::After(SHORT),
            _ if is_repeated && self.server == Server::Wrapped => Grace::After(LONG_GRACE),
            _ => Grace::Immediate,
        };
        let plan = Plan::of(self.server).grace(grace);
        let compresses = self.middleware.trait_of == Trait::Compresses;
        let plan = match self.side {
            Side::Inside => plan
                .inside(wrap)
                .outside(move |app| readable(app, compresses)),
            Side::Outside => plan.outside(move |app| readable(wrap(app), compresses)),
        };
        plan.start().await
    }

    async fn send(self, setup: &Setup, request: &Request) -> Exchange {
        let addr = setup.served.addr;
        match self.http {
            Http::One => {
                let mut connection = Connection::open(addr).await;
                connection.send(request).await;
                Exchange::One(connection)
            }
            Http::Two => {
                let mut connection = H2::open(addr).await;
                let stream = connection.send(request).await;
                Exchange::Two(connection, stream)
            }
        }
    }

    async fn run(self) {
        let setup = self.start().await;
        let mcp = setup.mcp().await;
        let is_repeated = self.middleware.trait_of == Trait::Repeats;
        let is_at_once = is_repeated && !self.server.has_sessions();
        if is_at_once || self.middleware.trait_of == Trait::Answers {
            return self.completes_at_once(&setup, &mcp).await;
        }
        let call = mcp.call_request(1, "hold", arguments("a"));
        let mut call = self.send(&setup, &call).await;
        setup.witness.started("a").await;
        if self.has_early_head() {
            call.head().await;
        }
        setup.events.started(&mcp, 1).await;
        match self.scenario {
            Completes => {
                self.assert_answered(&setup, call).await;
                let ended = setup.events.ended(&mcp, 1).await;
                let is_clear = self.is_clear();
                assert!(ended == Outcome::Completed || (!is_clear && ended == Outcome::Unknown));
            }
            Disconnects => {
                call.hang_up();
                let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
                assert_eq!(setup.events.ended(&mcp, 1).await, disconnected);
                assert!(setup.witness.ended("a").await.is_cancelled());
            }
            ResumesInTime => {
                let id = call.first_id().await;
                call.hang_up();
                setup.events.detached(&mcp, 1).await;
                let mut resumed = self.send(&setup, &mcp.resume_request(&id)).await;
                // rmcp's own sessions lose an answer that is ready before the resume.
                resumed.head().await;
                self.assert_answered(&setup, resumed).await;
            }
            ResumesLate => {
                let id = call.first_id().await;
                call.hang_up();
                let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
                assert_eq!(setup.events.ended(&mcp, 1).await, orphaned);
                assert!(setup.witness.ended("a").await.is_cancelled());
                let mut late = self.send(&setup, &mcp.resume_request(&id)).await;
                let received = late.answer().await.expect("an error");
                assert_eq!(received["error"]["code"], -32800, "{received}");
            }
            Cancels => {
                assert_eq!(mcp.cancel(1).await, 202);
                assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::ClientCancelled);
                assert!(setup.witness.ended("a").await.is_cancelled());
            }
            Deletes => {
                assert!((200..300).contains(&mcp.delete().await));
                let closed = Outcome::Cancelled(CancelReason::SessionClosed);
                assert_eq!(setup.events.ended(&mcp, 1).await, closed);
                // rmcp's own sessions only stop their handlers 5 s later.
                if self.server == Server::Wrapped {
                    assert!(setup.witness.ended("a").await.is_cancelled());
                }
            }
            Drains => {
                let mut drain = Box::pin(setup.calls.drain(LONG_GRACE));
                assert!(futures_util::poll!(&mut drain).is_pending());
                let (report, ()) = tokio::join!(drain, self.assert_answered(&setup, call));
                assert_eq!((report.ended, report.cancelled), (1, 0));
            }
        }
        setup.calls_reach(0).await;
    }

    /// Returns `true` if the layer can read the answer.
    fn is_clear(self) -> bool {
        let compresses = self.middleware.trait_of == Trait::Compresses;
        self.server == Server::Wrapped || self.side == Side::Outside || !compresses
    }

    async fn assert_answered(self, setup: &Setup, mut call: Exchange) {
        setup.witness.release("a");
        let answer = call.answer().await.expect("an answer");
        let text = &answer["result"]["content"][0]["text"];
        assert_eq!(
            (&answer["id"], text),
            (&json!(1), &json!("done:a")),
            "{answer}"
        );
        call.read_to_end().await;
        assert!(setup.witness.ended("a").await.is_completed());
    }

    /// Makes a call that must be answered at once.
    ///
    /// A middleware either answers it or, without a session, repeats it.
    async fn completes_at_once(self, setup: &Setup, mcp: &Mcp) {
        let echo = mcp.call_request(1, "echo", json!({ "text": "a" }));
        let mut call = self.send(setup, &echo).await;
        assert_eq!(call.answer().await.expect("an answer")["id"], 1);
        call.read_to_end().await;
        setup.calls_reach(0).await;
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            middleware,
            side,
            server,
            http,
            scenario,
        } = self;
        let name = middleware.name;
        write!(f, "{name} {side:?} {server:?} HTTP/{http:?} {scenario:?}")
    }
}

// === impl Exchange ===

impl Exchange {
    async fn head(&mut self) {
        let status = match self {
            Self::One(connection) if connection.is_complete() => connection.head().await.status,
            Self::One(_) => 200,
            Self::Two(_, stream) => stream.head().await.status,
        };
        assert_eq!(status, 200);
    }

    /// Returns the first event's id.
    async fn first_id(&mut self) -> String {
        let event = match self {
            Self::One(connection) => connection.event().await,
            Self::Two(_, stream) => stream.event().await,
        };
        event.expect("an event").id.expect("an id")
    }

    async fn answer(&mut self) -> Option<Value> {
        match self {
            Self::One(connection) => connection.answer().await,
            Self::Two(_, stream) => stream.answer().await,
        }
    }

    async fn read_to_end(&mut self) {
        match self {
            Self::One(connection) => drop(connection.body_to_end().await),
            Self::Two(_, stream) => drop(stream.body_to_end().await),
        }
    }

    fn hang_up(self) {
        match self {
            Self::One(connection) => connection.fin(),
            Self::Two(connection, stream) => {
                stream.reset();
                connection.hang_up();
            }
        }
    }
}

// === The middleware ===

/// A retry policy that never retries, because a streaming body can only be sent once.
#[derive(Clone)]
struct Once;

impl<R, E> Policy<HttpRequest, R, E> for Once {
    type Future = future::Ready<()>;

    fn retry(&mut self, _: &mut HttpRequest, _: &mut Result<R, E>) -> Option<Self::Future> {
        Some(future::ready(()))
    }

    fn clone_request(&mut self, _: &HttpRequest) -> Option<HttpRequest> {
        None
    }
}

fn everything(_: StatusCode, _: Version, _: &HeaderMap, _: &Extensions) -> bool {
    true
}

/// Makes a fallible layer usable with axum.
fn fallible<L>(layer: L) -> tower::layer::util::Stack<L, HandleErrorLayer<Unavailable, ()>> {
    tower::layer::util::Stack::new(layer, HandleErrorLayer::new(unavailable as Unavailable))
}

type Unavailable = fn(BoxError) -> future::Ready<Response>;

fn unavailable(error: BoxError) -> future::Ready<Response> {
    future::ready((StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response())
}

/// Decompresses on the client's behalf, so that the cells do not have to.
fn readable(app: Router, is_compressed: bool) -> Router {
    if is_compressed {
        app.layer(DecompressionLayer::new())
    } else {
        app
    }
}

async fn buffer_request(request: HttpRequest, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    next.run(HttpRequest::from_parts(parts, Body::from(body)))
        .await
}

async fn delay_frames(response: Response) -> Response {
    response.map(|body| {
        let frames = body.into_data_stream();
        Body::from_stream(frames.then(async |frame| {
            tokio::time::sleep(Duration::from_millis(5)).await;
            frame
        }))
    })
}

async fn hold_response(response: Response) -> Response {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    Response::from_parts(parts, Body::from(body))
}

/// Returns a request's head and its whole body.
async fn whole(request: HttpRequest) -> (axum::http::request::Parts, Bytes) {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    (parts, body)
}

fn is_call(body: &[u8]) -> bool {
    body.windows(10).any(|text| text == b"tools/call")
}

async fn drop_first_response(request: HttpRequest, next: Next) -> Response {
    let (parts, body) = whole(request).await;
    if is_call(&body) {
        let first = HttpRequest::from_parts(parts.clone(), Body::from(body.clone()));
        let first = next.clone().run(first).await;
        drop(first);
    }
    next.run(HttpRequest::from_parts(parts, Body::from(body)))
        .await
}

async fn answer_call(request: HttpRequest, next: Next) -> Response {
    let (parts, body) = whole(request).await;
    if is_call(&body) {
        let answer = json!({ "jsonrpc": "2.0", "id": 1, "result": {} });
        return axum::Json(answer).into_response();
    }
    next.run(HttpRequest::from_parts(parts, Body::from(body)))
        .await
}

// === The tests ===

#[tokio::test]
async fn a_call_ends_as_its_client_wants_in_any_composition_of_the_layer() {
    let chosen = env::var("COMBINATIONS").unwrap_or_default();
    let mut cells = table();
    cells.retain(|cell| cell.unsupported_reason().is_none());
    let mut dice = Dice::new();
    match &*chosen {
        "" => {
            dice.shuffle(&mut cells);
            cells.truncate(SAMPLE);
        }
        "all" => {}
        text => cells.retain(|cell| cell.to_string().contains(text)),
    }
    assert!(!cells.is_empty(), "no cell has {chosen:?} in its name");
    let count = cells.len();
    let played = stream::iter(cells).map(async |cell| {
        let ended = AssertUnwindSafe(cell.run()).catch_unwind().await;
        ended.is_err().then(|| cell.to_string())
    });
    let failed = played.buffer_unordered(CONCURRENCY);
    let failed: Vec<String> = failed.filter_map(future::ready).collect().await;
    assert!(
        failed.is_empty(),
        "{} of {count}: {failed:#?}",
        failed.len()
    );
}

#[test]
fn the_manual_names_what_is_not_supported() {
    let meaningless = ["there is no session", "the call is over at once"];
    let excuses = table().into_iter().filter_map(Cell::unsupported_reason);
    for unsupported_reason in
        excuses.filter(|unsupported_reason| !meaningless.contains(unsupported_reason))
    {
        assert!(
            MANUAL.contains(unsupported_reason),
            "{unsupported_reason:?}"
        );
    }
}
