//! A handler's token has the same reason as the `notifications/cancelled` sent to its server.

use mcp_cancel_on_disconnect::{CancelReason, Grace, Policy};
use rmcp::model::{CancelledNotificationParam, NumberOrString};
use std::time::Duration;
use tokio::sync::mpsc;

use crate::{
    setup::{Plan, Scripted, Server, Setup, StoppedClock, arguments, for_servers},
    support::*,
};

type Cancels = mpsc::UnboundedReceiver<CancelledNotificationParam>;

for_servers!(sessions {
    a_disconnect_has_the_same_reason_on_both_sides,
    an_orphan_has_the_same_reason_on_both_sides,
});

async fn a_disconnect_has_the_same_reason_on_both_sides(server: Server) {
    let (setup, cancels) = start(Plan::of(server)).await;
    let mcp = setup.mcp().await;

    setup.start_call(&mcp, 1, "any", "a").await.fin();

    assert_same_reason(&setup, cancels, CancelReason::ClientDisconnected).await;
}

async fn an_orphan_has_the_same_reason_on_both_sides(server: Server) {
    let clock = StoppedClock::stop();
    let grace = Duration::from_secs(20);
    let (setup, cancels) = start(Plan::of(server).grace(Grace::After(grace))).await;
    let mcp = setup.mcp().await;
    setup.start_call(&mcp, 1, "any", "a").await.fin();
    setup.events.detached(&mcp, 1).await;

    clock.advance(grace + Duration::from_millis(1)).await;

    assert_same_reason(&setup, cancels, CancelReason::Orphaned).await;
}

#[tokio::test]
async fn a_superseded_call_has_the_same_reason_on_both_sides() {
    let policy = |_: &_| Policy::new().grace(Grace::Never).supersede();
    let plan = Plan::of(Server::Wrapped).layer(|layer| layer.policy(policy));
    let (setup, cancels) = start(plan).await;
    let mcp = setup.mcp().await;
    setup.start_call(&mcp, 1, "any", "a").await.fin();
    setup.events.detached(&mcp, 1).await;
    let token = setup.tokens.of("a");

    let _again = mcp.call(2, "any", arguments("a")).await;

    within("the token to fire", token.cancelled()).await;
    assert_reason(cancels, token.reason(), CancelReason::Superseded).await;
}

#[tokio::test]
async fn a_closed_session_has_the_same_reason_on_both_sides() {
    let (setup, cancels) = start(Plan::of(Server::Wrapped)).await;
    let mcp = setup.mcp().await;
    let _call = setup.start_call(&mcp, 1, "any", "a").await;

    assert_eq!(mcp.delete().await, 202);

    assert_same_reason(&setup, cancels, CancelReason::SessionClosed).await;
}

/// Starts a server whose tool waits for its token, and returns the cancels that it receives.
async fn start(plan: Plan) -> (Setup, Cancels) {
    let (sender, cancels) = mpsc::unbounded_channel();
    let handler = Scripted::new(|context| async move {
        context.ct.cancelled().await;
        Ok("unread".to_owned())
    });
    let setup = plan.start_scripted(handler.on_cancelled(sender)).await;
    (setup, cancels)
}

async fn assert_same_reason(setup: &Setup, cancels: Cancels, expected: CancelReason) {
    let token = setup.tokens.of("a");
    within("the token to fire", token.cancelled()).await;
    assert_reason(cancels, token.reason(), expected).await;
}

async fn assert_reason(mut cancels: Cancels, reason: Option<CancelReason>, expected: CancelReason) {
    assert_eq!(reason, Some(expected));
    let cancelled = within("notifications/cancelled", cancels.recv()).await;
    let cancelled = cancelled.expect("the server is running");
    assert_eq!(cancelled.request_id, Some(NumberOrString::Number(1)));
    assert_eq!(cancelled.reason, Some(expected.to_string()));
}
