//! Each common middleware, both inside and outside the layer.

use std::time::Duration;

use axum::{
    BoxError, Router,
    body::Body,
    error_handling::HandleErrorLayer,
    extract::Request,
    middleware::map_response,
    response::{IntoResponse as _, Response},
};
use http::{Extensions, HeaderMap, StatusCode, Version, header};
use tower::{
    ServiceBuilder,
    buffer::BufferLayer,
    limit::{ConcurrencyLimitLayer, GlobalConcurrencyLimitLayer},
    load_shed::LoadShedLayer,
};
use tower_http::{
    auth::AsyncRequireAuthorizationLayer,
    catch_panic::CatchPanicLayer,
    compression::CompressionLayer,
    cors::CorsLayer,
    decompression::DecompressionLayer,
    limit::RequestBodyLimitLayer,
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    timeout::TimeoutLayer,
    trace::TraceLayer,
    validate_request::ValidateRequestHeaderLayer,
};

use mcp_cancel_on_disconnect::Outcome;
use serde_json::json;

use super::{AUTHORIZATION, check_bench};
use crate::{
    log::number,
    stack::{Bench, SessionMode},
    support::within,
};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(3_600);

macro_rules! stacks {
    ($($name:ident: $build:expr;)+) => {
        mod a_disconnected_call_is_cancelled_and_others_pass {
            use super::*;

            $(
                #[tokio::test]
                async fn $name() {
                    crate::composition::middleware::check($build).await;
                }
            )+
        }
    };
}

stacks! {
    with_nothing_else: |rmcp, cancel| rmcp.layer(cancel);

    as_a_route_layer: |rmcp, cancel| rmcp.route_layer(cancel);
    twice: |rmcp, cancel| rmcp.layer(cancel.clone()).layer(cancel);
    around_a_route_layer_of_its_own: |rmcp, cancel| rmcp.route_layer(cancel.clone()).layer(cancel);
    with_another_layer_inside: |rmcp, cancel| rmcp
        .layer(mcp_cancel_on_disconnect::CancelOnDisconnectLayer::new())
        .layer(cancel);
    with_trace_inside: |rmcp, cancel| rmcp.layer(TraceLayer::new_for_http()).layer(cancel);
    with_trace_outside: |rmcp, cancel| rmcp.layer(cancel).layer(TraceLayer::new_for_http());

    with_a_timeout_inside: |rmcp, cancel| rmcp.layer(timeout()).layer(cancel);
    with_a_timeout_outside: |rmcp, cancel| rmcp.layer(cancel).layer(timeout());

    with_compression_outside: |rmcp, cancel| uncompressed(compressed(rmcp.layer(cancel)));

    with_a_body_limit_inside: |rmcp, cancel| rmcp.layer(RequestBodyLimitLayer::new(1_024)).layer(cancel);
    with_a_body_limit_outside: |rmcp, cancel| rmcp.layer(cancel).layer(RequestBodyLimitLayer::new(1_024));

    with_catch_panic_inside: |rmcp, cancel| rmcp.layer(CatchPanicLayer::new()).layer(cancel);
    with_catch_panic_outside: |rmcp, cancel| rmcp.layer(cancel).layer(CatchPanicLayer::new());

    with_cors_inside: |rmcp, cancel| rmcp.layer(CorsLayer::permissive()).layer(cancel);
    with_cors_outside: |rmcp, cancel| rmcp.layer(cancel).layer(CorsLayer::permissive());

    with_a_request_id_inside: |rmcp, cancel| request_id(rmcp).layer(cancel).layer(map_response(require_id));
    with_a_request_id_outside: |rmcp, cancel| request_id(rmcp.layer(cancel)).layer(map_response(require_id));
    with_a_request_id_around_it: |rmcp, cancel| rmcp
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(cancel)
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(map_response(require_id));

    with_auth_inside: |rmcp, cancel| authorized(rmcp).layer(cancel);
    with_auth_outside: |rmcp, cancel| authorized(rmcp.layer(cancel));

    with_async_auth_inside: |rmcp, cancel| rmcp
        .layer(AsyncRequireAuthorizationLayer::new(authorize))
        .layer(cancel);
    with_async_auth_outside: |rmcp, cancel| rmcp
        .layer(cancel)
        .layer(AsyncRequireAuthorizationLayer::new(authorize));

    with_a_buffer_inside: |rmcp, cancel| buffered(rmcp).layer(cancel);
    with_a_buffer_outside: |rmcp, cancel| buffered(rmcp.layer(cancel));

    with_a_concurrency_limit_of_one_inside: |rmcp, cancel| rmcp.layer(ConcurrencyLimitLayer::new(1)).layer(cancel);
    with_a_concurrency_limit_of_one_outside: |rmcp, cancel| rmcp.layer(cancel).layer(ConcurrencyLimitLayer::new(1));
    with_a_global_limit_of_one_inside: |rmcp, cancel| rmcp.layer(GlobalConcurrencyLimitLayer::new(1)).layer(cancel);

    with_load_shed_inside: |rmcp, cancel| shedding(rmcp).layer(cancel);
    with_load_shed_outside: |rmcp, cancel| shedding(rmcp.layer(cancel));

    with_everything_outside: |rmcp, cancel| uncompressed(everything(rmcp.layer(cancel)));
}

/// Without a session manager, the layer cannot know if unreadable events contain the answer.
macro_rules! stacks_with_compression_inside {
    ($($name:ident: $build:expr;)+) => {
        mod a_disconnect_from_compressed_events_cancels_only_with_a_session_manager {
            use super::*;

            $(
                #[tokio::test]
                async fn $name() {
                    let bench = Bench::new(SessionMode::Wrapped, $build).await;
                    check_bench(&bench).await;
                    for mode in [SessionMode::LayerOnly, SessionMode::Stateless] {
                        check_in_doubt(&Bench::new(mode, $build).await).await;
                    }
                }
            )+
        }
    };
}

stacks_with_compression_inside! {
    with_compression_inside: |rmcp, cancel| uncompressed(compressed(rmcp).layer(cancel));
    with_auth_and_compression_inside: |rmcp, cancel| uncompressed(compressed(authorized(rmcp)).layer(cancel));
    with_everything_inside: |rmcp, cancel| uncompressed(everything(rmcp).layer(cancel));
}

/// Disconnects a call's client after bytes that the layer could not read.
async fn check_in_doubt(bench: &Bench) {
    let Bench {
        mode, witness, log, ..
    } = bench;
    let mcp = bench.client(&[AUTHORIZATION]).await;
    let arguments = json!({ "label": "gone", "events": 1 });
    let mut cancelled = mcp.call(1, "chatty", arguments).await;
    witness.started("gone").await;
    cancelled.head().await;
    cancelled.event().await.expect("an event");
    cancelled.fin();
    let ended = async {
        while log.ends(&number(1)).is_empty() {
            tokio::task::yield_now().await;
        }
    };
    within("the call to end", ended).await;
    assert_eq!(log.ends(&number(1)), [Outcome::Unknown], "{mode:?}");
    assert!(bench.layer.calls().is_empty(), "{mode:?}");
    let mut echo = mcp.call("3", "echo", json!({ "text": "again" })).await;
    assert_eq!(echo.answer().await.expect("an answer")["id"], "3");
}

fn everything(app: Router) -> Router {
    let app = shedding(buffered(authorized(request_id(app))));
    compressed(app.layer(CorsLayer::permissive()).layer(timeout()))
        .layer(RequestBodyLimitLayer::new(1_024))
        .layer(CatchPanicLayer::new())
        .layer(TraceLayer::new_for_http())
}

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG)
}

/// Compresses everything, including event streams.
fn compressed(app: Router) -> Router {
    let all = |_: StatusCode, _: Version, _: &HeaderMap, _: &Extensions| true;
    app.layer(CompressionLayer::new().compress_when(all))
}

/// Decompresses on the client's behalf, so that the tests do not have to.
///
/// Answers 406 if a response is not compressed.
fn uncompressed(app: Router) -> Router {
    app.layer(map_response(require_compression))
        .layer(DecompressionLayer::new())
}

async fn require_compression(response: Response) -> Response {
    let encoding = response.headers().get(header::CONTENT_ENCODING);
    match encoding {
        Some(_) => response,
        None => (StatusCode::NOT_ACCEPTABLE, "not compressed").into_response(),
    }
}

fn request_id(app: Router) -> Router {
    app.layer(PropagateRequestIdLayer::x_request_id())
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
}

async fn require_id(response: Response) -> Response {
    match response.headers().get("x-request-id") {
        Some(_) => response,
        None => (StatusCode::NOT_ACCEPTABLE, "no request id").into_response(),
    }
}

fn authorized(app: Router) -> Router {
    let (name, value) = AUTHORIZATION;
    let layer = ValidateRequestHeaderLayer::has_header_value(name, value);
    app.layer::<ValidateRequestHeaderLayer<
        tower_http::validate_request::RequiredHeaderValue<Body>,
    >>(layer.expect("a header"))
}

async fn authorize(request: Request) -> Result<Request, http::Response<Body>> {
    let (name, value) = AUTHORIZATION;
    match request.headers().get(name) {
        Some(found) if found == value => Ok(request),
        _ => Err(StatusCode::UNAUTHORIZED.into_response()),
    }
}

fn buffered(app: Router) -> Router {
    let stack = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(unavailable))
        .layer(BufferLayer::new(8));
    app.layer(stack)
}

fn shedding(app: Router) -> Router {
    let stack = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(unavailable))
        .layer(LoadShedLayer::new());
    app.layer(stack)
}

async fn unavailable(error: BoxError) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response()
}
