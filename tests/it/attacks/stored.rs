//! Events in a store, which gives them to whoever names one.

use std::sync::Arc;

use mcp_cancel_on_disconnect::{Grace, Outcome};
use rmcp::transport::streamable_http_server::session::{EventStore as _, ServerSseMessage};

use super::{ID, resumed};
use crate::{
    setup::{Plan, Server, Setup, Store},
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

/// Its session was served elsewhere before: the event is in the store, and nobody here has seen it go out.
#[tokio::test]
async fn a_stored_event_from_elsewhere_is_given_out() {
    let store = Arc::new(Store::default());
    let elsewhere = store.clone();
    let (first, second) = (ServerSseMessage::default(), ServerSseMessage::default());
    let first = elsewhere
        .store_event("a stream", &first)
        .await
        .expect("an id");
    let second = elsewhere
        .store_event("a stream", &second)
        .await
        .expect("an id");
    let setup = Plan::of(Server::Wrapped)
        .sessions(|local| local.with_event_store(store))
        .start();
    let setup = setup.await;
    let mcp = setup.mcp().await;

    let seen = resumed(&mcp, &first).await.expect("a stream");

    assert!(seen.contains(&second), "{seen}");
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
