//! A gateway between the layer and rmcp reports that it has received a call's answer.

use axum::{
    Router,
    body::Bytes,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    routing::post,
};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, Outcome};
use tokio::sync::mpsc;

use crate::{
    setup::{Events, GRACE, Plan, Server, Setup, StoppedClock, arguments, for_servers},
    support::*,
};

/// With the HTTP+SSE transport of 2024-11-05, the answer is sent on a stream that the layer does not associate with the call.
#[tokio::test]
async fn a_call_that_is_answered_with_202_has_an_unknown_end() {
    let events = Events::default();
    let layer = CancelOnDisconnectLayer::new().observe(events.observer());
    let app = Router::new().route("/messages", post(async |_: Bytes| StatusCode::ACCEPTED));
    let served = serve(app.layer(layer)).await;
    let mcp = Mcp::stateless(served.addr, "/messages");

    let mut call = mcp.call(1, "hold", arguments("a")).await;

    assert_eq!(call.head().await.status, 202);
    assert_eq!(events.ended(&mcp, 1).await, Outcome::Unknown);
}

for_servers!(sessions {
    a_detached_call_runs_on_after_its_grace_if_a_gateway_has_its_answer,
    a_late_resume_afterwards_is_handled_by_the_server,
});

async fn a_detached_call_runs_on_after_its_grace_if_a_gateway_has_its_answer(server: Server) {
    let clock = StoppedClock::stop();
    let (setup, mut tokens) = with_gateway(server).await;
    let mcp = setup.mcp().await;
    let token = cut(&setup, &mcp, &mut tokens).await;

    token.answered();

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(setup.calls.is_empty());
    clock.advance_past(GRACE).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"), "nothing was injected");
    assert!(!setup.tokens.of("a").is_cancelled());
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

async fn a_late_resume_afterwards_is_handled_by_the_server(server: Server) {
    let clock = StoppedClock::stop();
    let (setup, mut tokens) = with_gateway(server).await;
    let mcp = setup.mcp().await;
    let token = cut(&setup, &mcp, &mut tokens).await;
    token.answered();
    clock.advance_past(GRACE).await;

    let mut late = mcp.resume("0/0").await;

    assert_eq!(late.head().await.status, 200);
    setup.witness.release("a");
    late.assert_done("a").await;
}

/// Returns a server with a middleware inside the layer that hands out the calls' tokens.
async fn with_gateway(server: Server) -> (Setup, mpsc::UnboundedReceiver<CallToken>) {
    let (give, tokens) = mpsc::unbounded_channel();
    let gateway = move |router: Router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            if let Some(token) = request.extensions().get::<CallToken>() {
                // The test might have dropped its receiver.
                let _ = give.send(token.clone());
            }
            next.run(request)
        }))
    };
    let plan = Plan::with_grace(server).inside(gateway);
    (plan.start().await, tokens)
}

/// Disconnects a call's client after its first event, and waits until the server has noticed.
async fn cut(
    setup: &Setup,
    mcp: &Mcp,
    tokens: &mut mpsc::UnboundedReceiver<CallToken>,
) -> CallToken {
    // Discard the handshake's tokens.
    while tokens.try_recv().is_ok() {}
    setup.cut(mcp, 1, "a").await;
    tokens.try_recv().expect("the call's token")
}
