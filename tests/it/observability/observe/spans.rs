//! Events belong to their request's span, wherever they are emitted.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use tower_http::trace::TraceLayer;

use crate::{
    setup::{EXCHANGE, GRACE, Lines, Plan, Server, TICK, for_servers, request_span},
    support::*,
};

for_servers!(sessions {
    a_cancel_on_the_timers_task_belongs_to_the_request,
    a_cancel_in_a_destructor_belongs_to_the_request,
    a_resume_belongs_to_the_request_of_the_call,
    the_span_closes_with_the_call_even_if_its_token_is_kept,
    the_span_of_a_call_that_is_cancelled_closes_as_well,
});

async fn a_cancel_on_the_timers_task_belongs_to_the_request(server: Server) {
    let lines = Lines::all();
    let (clock, setup, mcp) = traced(Plan::with_grace(server)).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + TICK).await;
    setup.events.ended(&mcp, 1).await;

    assert_one_span(&lines, 3);
}

async fn a_cancel_in_a_destructor_belongs_to_the_request(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = traced(Plan::of(server)).client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    setup.events.ended(&mcp, 1).await;

    assert_one_span(&lines, 3);
}

async fn a_resume_belongs_to_the_request_of_the_call(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = traced(Plan::with_grace(server)).client().await;
    setup.cut(&mcp, 1, "a").await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;
    setup.assert_completes("a", &mut resumed).await;
    setup.events.ended(&mcp, 1).await;

    assert_one_span(&lines, 4);
}

async fn the_span_closes_with_the_call_even_if_its_token_is_kept(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = traced(Plan::of(server)).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    let span = assert_one_span(&lines, 1);
    assert!(!is_closed(&lines, &span), "{lines:?}");
    setup.assert_completes("a", &mut call).await;
    setup.exchanges.over_for("a").await;

    let _token = setup.tokens.of("a");
    until_closed(&setup, &mcp, &lines, &span).await;
}

async fn the_span_of_a_call_that_is_cancelled_closes_as_well(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = traced(Plan::of(server)).client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    setup.events.ended(&mcp, 1).await;
    setup.witness.ended("a").await;

    let span = assert_one_span(&lines, 3);
    let _token = setup.tokens.of("a");
    until_closed(&setup, &mcp, &lines, &span).await;
}

#[tokio::test]
async fn a_cancel_that_fails_belongs_to_the_request() {
    let lines = Lines::all();
    let plan = traced(Plan::of(Server::LayerOnly)).inside(refusing_replays);
    let (setup, mcp) = plan.client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    let failed = |kind| matches!(kind, crate::setup::EventKind::CancelFailed(_));
    setup.events.count(&mcp, 1, 1, failed).await;

    assert_one_span(&lines, 4);
    let warned = lines.matching(|line| line.starts_with(" WARN") && line.contains("call="));
    let [warned] = &*warned else {
        panic!("{lines:?}");
    };
    assert!(warned.contains("403 Forbidden"), "{warned}");
}

#[tokio::test]
async fn without_a_span_events_are_still_logged() {
    let lines = Lines::all();
    let (setup, mcp) = Server::Wrapped.client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    setup.events.ended(&mcp, 1).await;
    assert_eq!(lines.of_layer().len(), 3, "{lines:?}");
}

/// Serves every request in its own span.
fn traced(plan: Plan) -> Plan {
    let next = Arc::new(AtomicU64::new(1));
    plan.outside(move |router| {
        let make = move |_: &Request| request_span(next.fetch_add(1, Ordering::Relaxed));
        router.layer(TraceLayer::new_for_http().make_span_with(make))
    })
}

/// Asserts that all of call 1's lines are in the same span, and returns that span.
fn assert_one_span(lines: &Lines, count: usize) -> String {
    let of_call = lines.matching(|line| line.contains(r#"jsonrpc.request.id="1""#));
    assert_eq!(of_call.len(), count, "{of_call:#?}");
    let spans = of_call.iter().map(|line| {
        let at = line.find("request{number=").expect("a span");
        line[at..].split(':').next().expect("its end")
    });
    let spans: Vec<_> = spans.collect();
    assert!(spans.iter().all(|span| *span == spans[0]), "{of_call:#?}");
    spans[0].to_owned()
}

fn is_closed(lines: &Lines, span: &str) -> bool {
    let closed = lines.matching(|line| line.contains(span) && line.contains("close"));
    !closed.is_empty()
}

/// Waits until the server has dropped the rest of the exchange.
async fn until_closed(setup: &crate::setup::Setup, mcp: &Mcp, lines: &Lines, span: &str) {
    within("the span to close", async {
        while !is_closed(lines, span) {
            setup.assert_usable(mcp).await;
        }
    })
    .await;
}

/// Lets only the first request through that names its exchange.
fn refusing_replays(router: Router) -> Router {
    let seen = Arc::new(AtomicU64::new(0));
    router.layer(from_fn(move |request: Request, next: Next| {
        let is_call = request.headers().contains_key(EXCHANGE);
        let again = is_call && seen.fetch_add(1, Ordering::Relaxed) > 0;
        async move {
            if again {
                StatusCode::FORBIDDEN.into_response()
            } else {
                next.run(request).await
            }
        }
    }))
}
