//! Events in a store, which returns them for any request that refers to one.

use std::sync::Arc;

use axum::{body::Body, middleware::map_request};
use http::Request;
use mcp_cancel_on_disconnect::{CancellableSessionManager, Grace, Limits, Outcome};

use super::{ID, try_resume};
use crate::{
    setup::{FIRST_STORED, Plan, SavedSessions, Server, Setup, Store, Wrapper},
    support::*,
};

/// The second of the victim's events, which reports progress.
const PROGRESS: &str = "notifications/progress";

#[tokio::test]
async fn a_stored_event_of_another_session_is_not_replayed() {
    let (setup, victim) = stored(Server::Wrapped).await;
    let attacker = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    // Try again after the call has completed, when the store has the answer as well.
    for expected in [PROGRESS, "done:victim"] {
        assert_eq!(try_resume(&attacker, &first).await.as_deref(), Some(""));
        let own = try_resume(&victim, &first).await.expect("a stream");
        assert!(own.contains(expected), "not sent to its own session: {own}");
        setup.witness.release("victim");
        assert_eq!(setup.events.ended(&victim, ID).await, Outcome::Completed);
    }
}

/// For a client without a session, rmcp reads the store whichever session an event is from.
#[tokio::test]
async fn a_stored_event_of_a_session_is_not_replayed_to_a_client_without_one() {
    let (setup, victim) = stored(Server::Wrapped).await;
    let first = first_event(&setup, &victim).await;
    let attacker = Mcp::sessionless(setup.served.addr, PATH);

    assert_eq!(try_resume(&attacker, &first).await.as_deref(), Some(""));
}

/// The control. Without the manager, rmcp delivers the event that the tests above suppress.
#[tokio::test]
async fn without_the_manager_rmcp_replays_stored_events_to_any_client() {
    let (setup, victim) = stored(Server::LayerOnly).await;
    let attacker = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    let seen = try_resume(&attacker, &first).await.expect("a stream");
    assert!(seen.contains(PROGRESS), "{seen}");
}

/// The layer does not track this call, but its events are sent.
#[tokio::test]
async fn a_stored_event_of_a_call_over_the_limit_is_not_replayed() {
    let plan = Plan::of(Server::Wrapped).stored().grace(Grace::Never);
    let plan = plan.layer(|layer| layer.limits(Limits::default().calls(0)));
    assert_keeps_its_events(plan).await;
}

#[tokio::test]
async fn a_stored_event_of_a_manager_without_a_layer_is_not_replayed() {
    let plan = Plan::of(Server::Wrapped).stored();
    let plan = plan.inside(|router| {
        // Removes whatever the layer has inserted, as if there were no layer.
        router.layer(map_request(async |mut request: Request<Body>| {
            request.extensions_mut().clear();
            request
        }))
    });
    assert_keeps_its_events(plan).await;
}

/// Two services share a store, but each has its own sessions.
#[tokio::test]
async fn a_stored_event_is_not_replayed_by_another_manager_of_its_store() {
    let (setup, other) = sharing(|wrapper| wrapper, |wrapper| wrapper).await;
    let victim = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    let attacker = other.mcp().await;

    assert_eq!(try_resume(&attacker, &first).await.as_deref(), Some(""));
    let sessionless = Mcp::sessionless(other.served.addr, PATH);
    assert_eq!(try_resume(&sessionless, &first).await.as_deref(), Some(""));
    let own = try_resume(&victim, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");
}

/// A client that knows an event's id in the store still gets nothing for it.
#[tokio::test]
async fn a_stored_event_is_not_replayed_for_its_plain_id() {
    let (setup, victim) = stored(Server::Wrapped).await;
    first_event(&setup, &victim).await;

    for mcp in [&victim, &setup.mcp().await] {
        assert_eq!(try_resume(mcp, FIRST_STORED).await.as_deref(), Some(""));
    }
}

/// The session continues in another process, which shares the store and has the same key.
#[tokio::test]
async fn a_stored_event_of_a_process_with_the_same_key_is_replayed_to_its_session_only() {
    let key = |wrapper: Wrapper| wrapper.event_id_key("the shared key");
    let (before, after) = sharing(key, key).await;
    let (victim, first) = before_restart(&before).await;

    let same = victim.at(after.served.addr);
    let own = try_resume(&same, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");

    let attacker = after.mcp().await;
    assert_eq!(try_resume(&attacker, &first).await.as_deref(), Some(""));
}

/// By default, the other process would have a random key.
#[tokio::test]
async fn a_stored_event_of_a_process_with_another_key_is_not_replayed_to_any_client() {
    let (before, after) = sharing(|wrapper| wrapper.event_id_key("a key"), |wrapper| wrapper).await;
    let (victim, first) = before_restart(&before).await;

    let same = victim.at(after.served.addr);

    assert_eq!(try_resume(&same, &first).await.as_deref(), Some(""));
}

#[tokio::test]
async fn an_empty_key_is_the_same_as_no_key() {
    let (before, after) = sharing(|wrapper| wrapper.event_id_key(""), |wrapper| wrapper).await;
    let (victim, first) = before_restart(&before).await;

    // Both services use this process's random key.
    let own = try_resume(&victim.at(after.served.addr), &first).await;
    assert!(own.expect("a stream").contains(PROGRESS));
}

/// Starts two servers that share their events and sessions.
async fn sharing(
    first: impl FnOnce(Wrapper) -> Wrapper + 'static,
    second: impl FnOnce(Wrapper) -> Wrapper + 'static,
) -> (Setup, Setup) {
    let events = Arc::new(Store::default());
    let sessions = Arc::new(SavedSessions::default());
    let plan = || {
        let (events, sessions) = (events.clone(), sessions.clone());
        let plan = Plan::of(Server::Wrapped).grace(Grace::Never);
        let plan = plan.sessions(|local| local.with_event_store(events));
        plan.config(|mut config| {
            config.session_store = Some(sessions);
            config
        })
    };
    let new = CancellableSessionManager::new;
    let first = plan().wrap(move |local| first(new(local))).start().await;
    let second = plan().wrap(move |local| second(new(local))).start().await;
    (first, second)
}

/// Returns a client whose server is about to be replaced, and the id of its first event.
async fn before_restart(before: &Setup) -> (Mcp, String) {
    let victim = before.mcp().await;
    let first = first_event(before, &victim).await;
    (victim, first)
}

/// Asserts that an attacker gets none of a victim's events, while the victim gets them.
async fn assert_keeps_its_events(plan: Plan) {
    let setup = plan.start().await;
    let (victim, attacker) = (setup.mcp().await, setup.mcp().await);
    let mut call = setup.start_call(&victim, ID, "chatty", "victim").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    let first = first.id.expect("an id");
    call.event().await.expect("the progress");

    assert_eq!(try_resume(&attacker, &first).await.as_deref(), Some(""));
    let own = try_resume(&victim, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");
}

async fn stored(server: Server) -> (Setup, Mcp) {
    let setup = Plan::of(server).stored().grace(Grace::Never);
    let setup = setup.start().await;
    let victim = setup.mcp().await;
    (setup, victim)
}

/// Starts a call and disconnects its client, while the call keeps running.
///
/// Returns the id of its first event.
async fn first_event(setup: &Setup, victim: &Mcp) -> String {
    let mut call = setup.start_call(victim, ID, "chatty", "victim").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    call.event().await.expect("the progress");
    call.fin();
    setup.events.detached(victim, ID).await;
    first.id.expect("an id")
}
