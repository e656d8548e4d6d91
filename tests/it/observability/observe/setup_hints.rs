//! An incomplete setup is logged once per layer, along with how to fix it.

use std::sync::Arc;

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace, Policy};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use serde_json::json;
use tracing::Level;

use crate::{
    setup::{Lines, Plan, SavedSessions, Server, Sessions, Setup},
    support::*,
};

const NESTED: &str =
    "WARN mcp_cancel_on_disconnect::setup: a request passed through two CancelOnDisconnectLayers:";
const NO_LAYER: &str = "WARN mcp_cancel_on_disconnect::setup: a call reached CancellableSessionManager without passing through a CancelOnDisconnectLayer:";
const TWO_LAYERS: &str = "WARN mcp_cancel_on_disconnect::setup: a CancellableSessionManager is receiving calls \
    from two CancelOnDisconnectLayers:";
const NO_MANAGER: &str = "WARN mcp_cancel_on_disconnect::setup: event ids look like rmcp's, but no CancellableSessionManager is tracking their calls:";
const SUPERSEDE: &str = "WARN mcp_cancel_on_disconnect::setup: Policy::supersede has no effect";
const STORED: &str = "INFO mcp_cancel_on_disconnect::setup: an event store is in use,";
const WAITS: &str = "INFO mcp_cancel_on_disconnect::setup: a client disconnected, and its call is waiting for it to resume:";

/// Asserts that each line starts with the expected text, in order.
fn assert_lines(lines: &Lines, expected: &[&str]) {
    let logged = lines.of_layer();
    assert_eq!(logged.len(), expected.len(), "{logged:#?}");
    for (line, start) in logged.iter().zip(expected) {
        assert!(line.starts_with(start), "{start}: {line}");
    }
}

async fn assert_works(plan: Plan) -> Setup {
    let (setup, mcp) = plan.client().await;
    setup.assert_usable(&mcp).await;
    setup.assert_usable(&mcp).await;
    setup
}

#[tokio::test]
async fn a_documented_set_up_does_not_emit_a_hint() {
    let lines = Lines::up_to(Level::INFO);
    for server in [
        Server::Wrapped,
        Server::StatelessSse,
        Server::StatelessJson,
        Server::Bare,
    ] {
        assert_works(Plan::of(server)).await;
    }
    let clone = CancelOnDisconnectLayer::new();
    let app = two_routes(&clone, &clone.clone().grace(Grace::Never));
    assert_both_work(app).await;
    assert_lines(&lines, &[]);
}

#[tokio::test]
async fn a_layer_inside_another_hints_that_its_options_have_no_effect() {
    let lines = Lines::up_to(Level::INFO);
    let inside = |layer: CancelOnDisconnectLayer| {
        Plan::of(Server::Wrapped).inside(move |router| router.layer(layer))
    };
    let inner = CancelOnDisconnectLayer::new();
    assert_works(inside(inner.clone())).await;
    assert_lines(&lines, &[NESTED]);
    // A clone is the same layer, but a new layer is a different one.
    assert_works(inside(inner.grace(Grace::Never))).await;
    assert_lines(&lines, &[NESTED]);
    assert_works(inside(CancelOnDisconnectLayer::new())).await;
    assert_lines(&lines, &[NESTED, NESTED]);
}

#[tokio::test]
async fn a_session_manager_without_a_layer_hints_that_disconnects_are_not_detected() {
    let lines = Lines::up_to(Level::INFO);
    for servers in 1..=2 {
        let config = Mode::Session.config();
        let app = sessions().router(Tools::new(&Witness::new()), config);
        let served = serve(app).await;
        let mcp = Mcp::session(served.addr, PATH).await;
        assert_echoes(&mcp).await;
        assert_echoes(&mcp).await;
        assert_lines(&lines, &[NO_LAYER].repeat(servers));
    }
}

#[tokio::test]
async fn a_session_manager_behind_two_layers_hints_which_of_them_it_does_not_serve() {
    let lines = Lines::up_to(Level::INFO);
    let app = two_routes(
        &CancelOnDisconnectLayer::new(),
        &CancelOnDisconnectLayer::new(),
    );
    assert_both_work(app).await;
    assert_lines(&lines, &[TWO_LAYERS]);
}

#[tokio::test]
async fn rmcps_own_sessions_behind_the_layer_emit_a_hint() {
    let lines = Lines::up_to(Level::INFO);
    for servers in 1..=2 {
        assert_works(Plan::of(Server::LayerOnly)).await;
        assert_lines(&lines, &[NO_MANAGER].repeat(servers));
    }
}

#[tokio::test]
async fn event_ids_that_are_not_rmcps_do_not_emit_a_hint_about_the_session_manager() {
    let lines = Lines::up_to(Level::INFO);
    assert_works(Plan::of(Server::LayerOnly).stored()).await;
    assert_lines(&lines, &[]);
}

#[tokio::test]
async fn the_effects_of_a_policy_or_a_store_are_hinted_once_for_each_layer() {
    let lines = Lines::up_to(Level::INFO);
    let superseding = || {
        let plan = Plan::of(Server::LayerOnly).stored();
        plan.layer(|layer| layer.policy(|_| Policy::new().supersede()))
    };
    for servers in 1..=2 {
        assert_works(superseding()).await;
        assert_lines(&lines, &[SUPERSEDE].repeat(servers));
    }
    drop(lines);
    let lines = Lines::up_to(Level::INFO);
    for servers in 1..=2 {
        let plan = Plan::of(Server::Wrapped).stored().grace(Grace::Auto);
        let setup = plan.start().await;
        setup.cut(&setup.mcp().await, 1, "a").await;
        setup.cut(&setup.mcp().await, 1, "a").await;
        assert_lines(&lines, &[STORED].repeat(servers));
    }
}

#[tokio::test]
async fn the_first_call_that_waits_for_its_client_hints_at_the_grace_and_how_to_change_it() {
    let lines = Lines::up_to(Level::INFO);
    for servers in 1..=2 {
        let setup = Plan::of(Server::Wrapped).grace(Grace::Auto).start().await;
        setup.cut(&setup.mcp().await, 1, "a").await;
        setup.cut(&setup.mcp().await, 1, "a").await;
        assert_lines(&lines, &[WAITS].repeat(servers));
    }
    let logged = lines.of_layer().remove(0);
    for part in [
        "the call is cancelled once its grace period expires (at least 20 s by default)",
        "CancelOnDisconnectLayer::grace",
        "Grace::Immediate",
    ] {
        assert!(logged.contains(part), "{part}: {logged}");
    }
    drop(lines);
    let lines = Lines::up_to(Level::INFO);
    let setup = Plan::of(Server::Wrapped).grace(Grace::Never).start().await;
    setup.cut(&setup.mcp().await, 1, "a").await;
    assert_lines(&lines, &[]);
}

/// The call restores its session, which no session manager has when the body is read.
#[tokio::test]
async fn the_first_call_of_a_restored_session_does_not_hint_that_supersede_has_no_effect() {
    let store = Arc::new(SavedSessions::default());
    let plan = || {
        let store = store.clone();
        let plan = Plan::of(Server::Wrapped).config(move |mut config| {
            config.session_store = Some(store);
            config
        });
        plan.layer(|layer| layer.policy(|_| Policy::new().supersede()))
    };
    let first = plan().start().await;
    let mcp = first.mcp().await;
    let lines = Lines::up_to(Level::WARN);
    let second = plan().start().await;

    second.assert_usable(&mcp.at(second.served.addr)).await;

    assert_lines(&lines, &[]);
}

/// The client polls and has been connected all the time.
#[tokio::test]
async fn a_stream_that_the_server_ends_does_not_emit_a_hint_about_a_disconnect() {
    let lines = Lines::up_to(Level::INFO);
    let (setup, mcp) = Plan::of(Server::Wrapped).client().await;
    let _l = setup.start_primed(&mcp, 1, "hold", "a").await;
    let session = mcp.session_id().expect("a session");
    let handle = setup.sessions.local().sessions.read().await[session].clone();
    let closed = handle.close_sse_stream(0, None).await;
    closed.expect("the session is closed");
    setup.events.detached(&mcp, 1).await;

    assert_lines(&lines, &[]);
}

// === Helpers ===

fn sessions() -> Sessions {
    let local = LocalSessionManager::default();
    Sessions::Wrapped(Arc::new(CancellableSessionManager::new(local)))
}

/// Puts one session manager on two routes, with a layer on each.
fn two_routes(one: &CancelOnDisconnectLayer, other: &CancelOnDisconnectLayer) -> Router {
    let sessions = sessions();
    let route = || sessions.router(Tools::new(&Witness::new()), Mode::Session.config());
    Router::new()
        .nest("/one", route().layer(one.clone()))
        .nest("/other", route().layer(other.clone()))
}

async fn assert_both_work(app: Router) {
    let served = serve(app).await;
    for path in ["/one/mcp", "/other/mcp"] {
        let mcp = Mcp::session(served.addr, path).await;
        assert_echoes(&mcp).await;
        assert_echoes(&mcp).await;
    }
}

async fn assert_echoes(mcp: &Mcp) {
    let mut call = mcp.call(1, "echo", json!({ "text": "hello" })).await;
    let answer = call.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "hello");
}
