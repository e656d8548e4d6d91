//! Events in a store, which gives them to whoever names one.

use std::sync::Arc;

use axum::{body::Body, middleware::map_request};
use http::Request;
use mcp_cancel_on_disconnect::{CancellableSessionManager, Grace, Limits, Outcome};

use super::{ID, resumed};
use crate::{
    setup::{FIRST_STORED, Plan, SavedSessions, Server, Setup, Store, Wrapper},
    support::*,
};

/// The second of the victim's events: its progress.
const PROGRESS: &str = "notifications/progress";

#[tokio::test]
async fn a_stored_event_of_another_session_is_not_given_out() {
    let (setup, victim) = stored(Server::Wrapped).await;
    let stranger = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    // After the end as well: the answer is in the store.
    for brought in [PROGRESS, "done:victim"] {
        assert_eq!(resumed(&stranger, &first).await.as_deref(), Some(""));
        let own = resumed(&victim, &first).await.expect("a stream");
        assert!(own.contains(brought), "its own session gets it: {own}");
        setup.witness.release("victim");
        assert_eq!(setup.events.ended(&victim, ID).await, Outcome::Completed);
    }
}

/// rmcp reads the store for them past all sessions.
#[tokio::test]
async fn a_stored_event_of_a_session_is_not_given_out_to_a_client_without_one() {
    let (setup, victim) = stored(Server::Wrapped).await;
    let first = first_event(&setup, &victim).await;
    let stranger = Mcp::sessionless(setup.served.addr, PATH);

    assert_eq!(resumed(&stranger, &first).await.as_deref(), Some(""));
}

/// The control: what is stopped above.
#[tokio::test]
async fn without_the_manager_rmcp_gives_stored_events_to_anybody() {
    let (setup, victim) = stored(Server::LayerOnly).await;
    let stranger = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    let seen = resumed(&stranger, &first).await.expect("a stream");
    assert!(seen.contains(PROGRESS), "{seen}");
}

/// A call that no layer tracks: its events go out all the same.
#[tokio::test]
async fn a_stored_event_of_a_call_beyond_the_limit_is_not_given_out() {
    let plan = Plan::of(Server::Wrapped).stored().grace(Grace::Never);
    let plan = plan.layer(|layer| layer.limits(Limits::default().calls(0)));
    assert_keeps_its_events(plan).await;
}

#[tokio::test]
async fn a_stored_event_of_a_manager_without_a_layer_is_not_given_out() {
    let plan = Plan::of(Server::Wrapped).stored();
    let plan = plan.inside(|router| {
        // What the layer put there is gone: as if there were none.
        router.layer(map_request(async |mut request: Request<Body>| {
            request.extensions_mut().clear();
            request
        }))
    });
    assert_keeps_its_events(plan).await;
}

/// Two services that share a store, each with sessions of its own.
#[tokio::test]
async fn a_stored_event_is_not_given_out_by_another_manager_over_its_store() {
    let (setup, other) = sharing(|wrapper| wrapper, |wrapper| wrapper).await;
    let victim = setup.mcp().await;
    let first = first_event(&setup, &victim).await;

    let stranger = other.mcp().await;

    assert_eq!(resumed(&stranger, &first).await.as_deref(), Some(""));
    let sessionless = Mcp::sessionless(other.served.addr, PATH);
    assert_eq!(resumed(&sessionless, &first).await.as_deref(), Some(""));
    let own = resumed(&victim, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");
}

/// Whoever learns the id that the store gave has nothing of it.
#[tokio::test]
async fn a_stored_event_is_not_given_out_under_the_id_that_its_store_gave() {
    let (setup, victim) = stored(Server::Wrapped).await;
    first_event(&setup, &victim).await;

    for mcp in [&victim, &setup.mcp().await] {
        assert_eq!(resumed(mcp, FIRST_STORED).await.as_deref(), Some(""));
    }
}

/// The session goes on in another process, which shares the store and was given the key.
#[tokio::test]
async fn a_stored_event_of_a_process_with_the_same_key_is_given_out_to_its_session_only() {
    let key = |wrapper: Wrapper| wrapper.event_id_key("the key of both");
    let (before, after) = sharing(key, key).await;
    let (victim, first) = before_restart(&before).await;

    let same = victim.at(after.served.addr);
    let own = resumed(&same, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");

    let stranger = after.mcp().await;
    assert_eq!(resumed(&stranger, &first).await.as_deref(), Some(""));
}

/// What another process would have by default.
#[tokio::test]
async fn a_stored_event_of_a_process_with_another_key_is_given_out_to_nobody() {
    let (before, after) = sharing(|wrapper| wrapper.event_id_key("a key"), |wrapper| wrapper).await;
    let (victim, first) = before_restart(&before).await;

    let same = victim.at(after.served.addr);

    assert_eq!(resumed(&same, &first).await.as_deref(), Some(""));
}

#[tokio::test]
async fn an_empty_key_binds_events_to_nobody_elses_guess() {
    let (before, after) = sharing(|wrapper| wrapper.event_id_key(""), |wrapper| wrapper).await;
    let (victim, first) = before_restart(&before).await;

    // Both have the random key of this process.
    let own = resumed(&victim.at(after.served.addr), &first).await;
    assert!(own.expect("a stream").contains(PROGRESS));
}

/// Two servers that share their events and sessions.
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

/// A client whose server is then replaced, and the first event that it has.
async fn before_restart(before: &Setup) -> (Mcp, String) {
    let victim = before.mcp().await;
    let first = first_event(before, &victim).await;
    (victim, first)
}

/// A stranger gets none of a victim's events, and the victim does.
async fn assert_keeps_its_events(plan: Plan) {
    let setup = plan.start().await;
    let (victim, stranger) = (setup.mcp().await, setup.mcp().await);
    let mut call = setup.start_call(&victim, ID, "chatty", "victim").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    let first = first.id.expect("an id");
    call.event().await.expect("the progress");

    assert_eq!(resumed(&stranger, &first).await.as_deref(), Some(""));
    let own = resumed(&victim, &first).await.expect("a stream");
    assert!(own.contains(PROGRESS), "{own}");
}

async fn stored(server: Server) -> (Setup, Mcp) {
    let setup = Plan::of(server).stored().grace(Grace::Never);
    let setup = setup.start().await;
    let victim = setup.mcp().await;
    (setup, victim)
}

/// The id of the first event of a call that goes on without its client.
async fn first_event(setup: &Setup, victim: &Mcp) -> String {
    let mut call = setup.start_call(victim, ID, "chatty", "victim").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    call.event().await.expect("the progress");
    call.fin();
    setup.events.detached(victim, ID).await;
    first.id.expect("an id")
}
