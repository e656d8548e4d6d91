//! The token in a handler's context fires with the call's own token.
//!
//! This applies even where rmcp alone never cancels: to a call at revision 2026-07-28 whose events are stored, and to a
//! call whose cancellation the server has refused.

use std::time::Duration;

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{CallToken, CancelReason, Grace, Outcome};
use rmcp::{ErrorData, ServerHandler, model, service::SubscriptionContext};
use serde_json::json;
use tokio::sync::mpsc;

use crate::{
    setup::{DISCONNECTED, EventKind, Plan, Server, Setup},
    support::*,
};

/// Long enough that no handler is dropped in these tests, so that only its token fires.
const WINDOW: Duration = Duration::from_secs(3_600);

/// Revision 2026-07-28 requires this with a MUST.
#[tokio::test]
async fn the_token_of_a_stored_call_of_2026_07_28_fires() {
    let setup = stored(Server::StatelessSse)
        .abort_after(WINDOW)
        .start()
        .await;
    let mcp = Mcp::sessionless(setup.served.addr, PATH);

    start_chatty(&setup, &mcp).await.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    assert_eq!(
        setup.events.of(&mcp, 1),
        [EventKind::Started, EventKind::Ended(DISCONNECTED)]
    );
}

/// The first control.
///
/// The layer fires the call's token, but without the wrapper the token in the handler's context does not fire.
#[tokio::test]
async fn without_abort_on_cancel_only_its_call_token_fires() {
    let setup = stored(Server::StatelessSse).start().await;
    let mcp = Mcp::sessionless(setup.served.addr, PATH);

    start_chatty(&setup, &mcp).await.fin();

    within("the call's token to fire", setup.tokens.of("a").cancelled()).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
}

/// The second control.
#[tokio::test]
async fn bare_rmcp_does_not_fire_the_token_of_a_stored_call() {
    let setup = stored(Server::Bare).start().await;
    let mcp = Mcp::sessionless(setup.served.addr, PATH);

    start_chatty(&setup, &mcp).await.fin();

    setup.exchanges.over_for("a").await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
}

/// Before 2026-07-28 a disconnect is not a cancellation.
///
/// With a store, the client can resume on any server.
#[tokio::test]
async fn a_stored_call_of_an_older_revision_keeps_running() {
    let plan = stored(Server::StatelessSse).grace(Grace::Auto);
    let (setup, mcp) = plan.abort_after(Duration::ZERO).client().await;

    start_chatty(&setup, &mcp).await.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Unknown);
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert!(!setup.tokens.of("a").is_cancelled());
    assert_eq!(
        setup.events.of(&mcp, 1),
        [EventKind::Started, EventKind::Ended(Outcome::Unknown)]
    );
}

/// The control. Bare rmcp lets the call keep running, too.
#[tokio::test]
async fn bare_rmcp_keeps_running_a_stored_call_of_an_older_revision() {
    let plan = stored(Server::Bare).config(|config| config.with_legacy_session_mode(false));
    let setup = plan.start().await;
    let mcp = Mcp::stateless(setup.served.addr, PATH);

    start_chatty(&setup, &mcp).await.fin();

    setup.exchanges.over_for("a").await;
    setup.assert_usable(&mcp).await;
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
}

/// The store cannot have any of such a call's events yet.
#[tokio::test]
async fn a_call_of_an_older_revision_without_an_event_id_is_cancelled() {
    let plan = stored(Server::StatelessSse).grace(Grace::Auto);
    let plan = plan.config(|config| config.with_sse_retry(None));
    let (setup, mcp) = plan.abort_after(WINDOW).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
}

#[tokio::test]
async fn a_grace_that_the_user_set_holds_for_stored_calls() {
    let grace = Duration::from_secs(7);
    let plan = stored(Server::StatelessSse).grace(Grace::After(grace));
    let (clock, setup, mcp) = plan.abort_after(WINDOW).stopped().await;
    start_chatty(&setup, &mcp).await.fin();
    assert_eq!(setup.events.detached(&mcp, 1).await.0, Some(grace));
    assert!(setup.witness.is_running("a"));

    clock.advance(grace + Duration::from_millis(1)).await;

    assert!(setup.witness.ended("a").await.is_cancelled());
    let reason = setup.tokens.of("a").reason();
    assert_eq!(reason, Some(CancelReason::Orphaned));
}

#[tokio::test]
async fn an_immediate_grace_that_the_user_set_holds_for_stored_calls() {
    let plan = stored(Server::StatelessSse).grace(Grace::Immediate);
    let (setup, mcp) = plan.abort_after(WINDOW).client().await;

    start_chatty(&setup, &mcp).await.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
}

#[tokio::test]
async fn the_token_of_a_handler_fires_although_the_server_refused_the_cancel() {
    let plan = Plan::of(Server::LayerOnly).inside(refusing_replays);
    let (setup, mcp) = plan.abort_after(WINDOW).client().await;
    let mut other = setup.start_call(&mcp, 2, "hold", "other").await;

    setup.start_call(&mcp, 1, "hold", "a").await.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    let refused = EventKind::CancelFailed(Some(StatusCode::FORBIDDEN));
    setup.events.count(&mcp, 1, 1, |kind| kind == refused).await;
    setup.assert_completes("other", &mut other).await;
}

/// The control.
#[tokio::test]
async fn bare_rmcp_does_not_fire_the_token_if_the_server_refused_the_cancel() {
    let (setup, mcp) = Plan::of(Server::LayerOnly)
        .inside(refusing_replays)
        .client()
        .await;

    setup.start_call(&mcp, 1, "hold", "a").await.fin();

    let refused = EventKind::CancelFailed(Some(StatusCode::FORBIDDEN));
    setup.events.count(&mcp, 1, 1, |kind| kind == refused).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
}

/// rmcp lets a subscription listen forever if its events are stored.
#[tokio::test]
async fn a_stored_subscription_ends_with_its_stream() {
    let (ended, mut ends) = mpsc::unbounded_channel();
    let plan = stored(Server::StatelessSse).abort_after(WINDOW);
    let setup = plan.start_handler(Listener(ended)).await;
    let mcp = Mcp::sessionless(setup.served.addr, PATH);
    let params = json!({ "notifications": { "toolsListChanged": true } });
    let mut stream = mcp.request(1, "subscriptions/listen", params).await;
    assert_eq!(stream.head().await.status, 200);

    stream.fin();

    within("the subscription to end", ends.recv())
        .await
        .expect("the handler reports the end");
}

fn stored(server: Server) -> Plan {
    Plan::of(server).stored()
}

/// Starts a call and reads its first event, from which its client could resume.
async fn start_chatty(setup: &Setup, mcp: &Mcp) -> Connection {
    setup.start_primed(mcp, 1, "chatty", "a").await
}

/// Refuses the requests that the layer replays.
fn refusing_replays(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let token = request.extensions().get::<CallToken>();
        if token.is_some_and(CallToken::is_replay) {
            return StatusCode::FORBIDDEN.into_response();
        }
        next.run(request).await
    }))
}

/// Reports when a subscription has ended.
#[derive(Clone)]
struct Listener(mpsc::UnboundedSender<()>);

impl ServerHandler for Listener {
    fn get_info(&self) -> model::ServerConfig {
        let capabilities = model::ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .build();
        model::ServerConfig::new(capabilities)
    }

    fn accepted_subscription_filter(
        &self,
        requested: &model::SubscriptionFilter,
    ) -> Option<model::SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        context.cancelled().await;
        // The test might have dropped its receiver.
        let _ = self.0.send(());
        Ok(())
    }
}
