//! A call with more event ids than the layer stores, and resumes of other streams of its session.

use serde_json::json;

use crate::{
    setup::{GRACE, ORPHANED, Plan, Server, Setup, StoppedClock, TICK, for_servers},
    support::*,
};

/// More than the 257 event ids that are stored of a call.
const EVENTS: u32 = 300;

for_servers!(sessions {
    a_resumed_standalone_stream_does_not_keep_a_call_with_many_events,
    a_late_resume_of_another_call_does_not_keep_a_call_with_many_events,
});

/// Starts call 1 and reads all its events. Also returns the id of one that is no longer stored.
async fn chatty(mcp: &Mcp) -> (Connection, String) {
    let arguments = json!({ "label": "a", "events": EVENTS });
    let mut call = mcp.call(1, "chatty", arguments).await;
    call.head().await;
    let mut forgotten = None;
    for nth in 0..=EVENTS {
        let event = call.event().await.expect("priming and progress");
        if nth == 5 {
            forgotten = event.id;
        }
    }
    (call, forgotten.expect("an id"))
}

async fn assert_orphaned(setup: &Setup, clock: &StoppedClock, mcp: &Mcp) {
    let (grace, _) = setup.events.detached(mcp, 1).await;
    assert_eq!(grace, Some(GRACE), "its own client has not resumed it");
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(mcp, 1).await, ORPHANED);
}

async fn a_resumed_standalone_stream_does_not_keep_a_call_with_many_events(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    let id = standalone.event().await.and_then(|event| event.id);
    let (call, _) = chatty(&mcp).await;
    // As after a proxy's idle timeout: the client reopens the stream with its last event id.
    standalone.fin();
    let mut standalone = mcp.resume(&id.expect("an id")).await;
    assert_eq!(standalone.head().await.status, 200);

    call.fin();

    assert_orphaned(&setup, &clock, &mcp).await;
}

/// The other call has completed while its client was away, and behind the layer alone it counts as an orphan.
async fn a_late_resume_of_another_call_does_not_keep_a_call_with_many_events(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let event = setup.cut(&mcp, 2, "b").await;
    let (call, _) = chatty(&mcp).await;
    setup.witness.release("b");
    setup.witness.ended("b").await;
    clock.advance(GRACE + TICK).await;
    setup.events.ended(&mcp, 2).await;
    clock.advance(GRACE * 4).await;
    setup.assert_usable(&mcp).await;
    let mut late = mcp.resume(&event).await;
    assert_eq!(late.head().await.status, 200);

    call.fin();

    assert_orphaned(&setup, &clock, &mcp).await;
}

/// Its client may have resumed before the loss of its first connection was detected.
#[tokio::test]
async fn a_resume_with_an_id_that_is_no_longer_stored_keeps_the_call() {
    let (clock, setup, mcp) = Plan::with_grace(Server::LayerOnly).stopped().await;
    let (call, forgotten) = chatty(&mcp).await;
    let mut resumed = mcp.resume(&forgotten).await;
    assert_eq!(resumed.head().await.status, 200);

    call.fin();

    setup.events.detached(&mcp, 1).await;
    clock.advance(GRACE * 4).await;
    assert_eq!(setup.calls.len(), 1, "it keeps running");
}
