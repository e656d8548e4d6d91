//! An event store that fails mid-call, either for the answer or for a resume.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use mcp_cancel_on_disconnect::{CancellableSessionManager, Grace};

use crate::{
    setup::{Failing, Plan, Server, Setup, for_servers},
    support::*,
};

const HOUR: Duration = Duration::from_secs(3_600);

for_servers!([bare = Bare, layer_only = LayerOnly, wrapped = Wrapped] {
    a_resume_that_the_store_refuses_does_not_affect_the_first_stream,
    a_resume_that_the_store_refuses_does_not_cancel_the_call_of_a_connected_client,
});

async fn a_resume_that_the_store_refuses_does_not_affect_the_first_stream(server: Server) {
    refused_resume(server, Grace::Auto).await;
}

async fn a_resume_that_the_store_refuses_does_not_cancel_the_call_of_a_connected_client(
    server: Server,
) {
    refused_resume(server, Grace::Immediate).await;
}

async fn refused_resume(server: Server, grace: Grace) {
    let (plan, store) = failing(server);
    let (setup, mcp) = plan.grace(grace).client().await;
    let (mut call, id) = started(&setup, &mcp).await;
    store.rejects_replays.store(true, Ordering::Relaxed);

    let mut resumed = mcp.resume(&id).await;
    assert_eq!(resumed.head().await.status, 200);
    assert!(
        resumed.event().await.is_none(),
        "the resumed stream delivers nothing"
    );
    store.rejects_replays.store(false, Ordering::Relaxed);

    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    call.assert_done("a").await;
}

/// The session would have nothing left by which the end of the call could be observed.
#[tokio::test]
async fn the_end_of_a_call_whose_answer_the_store_refused_is_observed() {
    let (plan, store) = failing(Server::Wrapped);
    let plan = plan.sessions(|mut local| {
        local.session_config.keep_alive = None;
        local
    });
    let plan = plan.wrap(|local| CancellableSessionManager::new(local).idle_timeout(HOUR));
    let (clock, setup, mcp) = plan.grace(Grace::Auto).stopped().await;
    let (mut call, _) = started(&setup, &mcp).await;

    lose_answer(&setup, &store, &mut call).await;
    setup.assert_usable(&mcp).await;

    assert!(setup.calls.is_empty(), "{:?}", setup.calls.snapshot());
    for _ in 0..3 {
        clock.advance(HOUR).await;
    }
    let status = mcp.listen().await.head().await.status;
    assert_eq!(status, 404, "the session has been closed");
}

#[tokio::test]
async fn an_answer_that_the_store_refused_is_retained_for_its_client() {
    let (plan, store) = failing(Server::Wrapped);
    let (setup, mcp) = plan.grace(Grace::Auto).client().await;
    let (mut call, id) = started(&setup, &mcp).await;

    lose_answer(&setup, &store, &mut call).await;

    assert_delivers_the_answer(mcp.resume(&id).await).await;
}

#[tokio::test]
async fn an_answer_that_the_store_refused_is_retained_for_a_disconnected_client() {
    let (plan, store) = failing(Server::Wrapped);
    let (setup, mcp) = plan.grace(Grace::Auto).client().await;
    let (call, id) = started(&setup, &mcp).await;
    call.fin();
    setup.events.detached(&mcp, 1).await;
    store.rejects_answers.store(true, Ordering::Relaxed);

    setup.witness.release("a");
    setup.calls_reach(0).await;
    store.rejects_answers.store(false, Ordering::Relaxed);

    assert_delivers_the_answer(mcp.resume(&id).await).await;
}

/// Returns a plan for a server whose sessions have a store, and that store. It does not fail yet.
fn failing(server: Server) -> (Plan, Arc<Failing>) {
    let store = Arc::new(Failing::default());
    let server_store = store.clone();
    let plan = Plan::of(server).sessions(move |local| local.with_event_store(server_store));
    (plan, store)
}

/// Starts call 1, reads its first event and returns the event's id.
async fn started(setup: &Setup, mcp: &Mcp) -> (Connection, String) {
    let mut call = setup.start_call(mcp, 1, "hold", "a").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    (call, first.id.expect("an id"))
}

/// Completes a call while the store refuses its answer.
async fn lose_answer(setup: &Setup, store: &Failing, call: &mut Connection) {
    store.rejects_answers.store(true, Ordering::Relaxed);
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert!(call.event().await.is_none(), "rmcp ends the stream");
    store.rejects_answers.store(false, Ordering::Relaxed);
    setup.exchanges.over_for("a").await;
}

async fn assert_delivers_the_answer(mut resumed: Connection) {
    resumed.head().await;
    resumed.assert_done("a").await;
}
