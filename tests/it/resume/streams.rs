//! Clients that open more streams than they have calls, as Cursor and VS Code do.
//!
//! These streams neither cancel calls nor keep them alive. They carry the same events as without the layer.

use std::time::Duration;

use mcp_cancel_on_disconnect::Outcome;
use serde_json::json;

use crate::{
    setup::{EventKind, GRACE, ORPHANED, Plan, Server, Setup, StoppedClock, TICK, for_servers},
    support::*,
};

/// The delay after which EventSource reopens a stream that has ended. rmcp sends it as `retry`.
const REOPEN: Duration = Duration::from_secs(3);

/// Just below the five minutes after which rmcp closes a silent session.
const RECONNECT: Duration = Duration::from_secs(290);

/// Enough reopens to outlast the retention of an ended call.
const REOPENS: u32 = 25;

for_servers!(sessions {
    resumed_completed_streams_have_the_same_events_as_without_the_layer,
    standalone_streams_have_the_same_events_as_without_the_layer,
    resumed_completed_streams_do_not_keep_a_call,
    standalone_streams_that_open_and_close_do_not_keep_a_call,
    no_attached_call_is_cancelled_by_other_streams,
});

async fn resumed_completed_streams_have_the_same_events_as_without_the_layer(server: Server) {
    let clock = StoppedClock::stop();
    let bare = Server::Bare.start().await;
    let (setup, mcp) = Plan::with_grace(server).client().await;

    let with_the_layer = reopen_repeatedly(&mcp, &clock).await;

    assert_eq!(
        with_the_layer,
        reopen_repeatedly(&bare.mcp().await, &clock).await
    );
    let (first, reopened) = with_the_layer.split_first().expect("the first stream");
    assert_eq!(first.len(), 2, "the priming event and the answer");
    assert_eq!(reopened.len(), REOPENS as usize);
    let expected = [EventKind::Started, EventKind::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(setup.calls.is_empty());
}

async fn standalone_streams_have_the_same_events_as_without_the_layer(server: Server) {
    let clock = StoppedClock::stop();
    let bare = Server::Bare.start().await;
    let setup = Plan::with_grace(server).start().await;

    let with_the_layer = replace_repeatedly(&setup, &clock).await;

    assert_eq!(with_the_layer, replace_repeatedly(&bare, &clock).await);
    assert!(with_the_layer.iter().all(|events| !events.is_empty()));
}

async fn resumed_completed_streams_do_not_keep_a_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let (_, last) = whole(&mut mcp.call(1, "echo", json!({ "text": "a" })).await).await;
    let last = last.expect("an id");
    let mut orphan = setup.start_call(&mcp, 2, "hold", "orphan").await;
    orphan.head().await;
    orphan.fin();
    let (_, since) = setup.events.detached(&mcp, 2).await;

    let mut passed = Duration::ZERO;
    while passed + REOPEN < GRACE {
        clock.advance(REOPEN).await;
        passed += REOPEN;
        whole(&mut mcp.resume(&last).await).await;
    }
    clock.advance(GRACE - passed + TICK).await;

    assert_orphaned_on_time(&setup, &mcp, since).await;
}

async fn standalone_streams_that_open_and_close_do_not_keep_a_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let mut orphan = setup.start_call(&mcp, 2, "hold", "orphan").await;
    orphan.head().await;
    orphan.fin();
    let (_, since) = setup.events.detached(&mcp, 2).await;
    let mut open = Vec::new();
    let mut passed = Duration::ZERO;
    while passed + REOPEN < GRACE {
        clock.advance(REOPEN).await;
        passed += REOPEN;
        // Opens a new stream and one that resumes after an event, and then closes the oldest open stream.
        for mut stream in [mcp.listen().await, mcp.resume("0").await] {
            assert_eq!(stream.head().await.status, 200);
            open.push(stream);
        }
        open.remove(0).rst();
    }
    clock.advance(GRACE - passed + TICK).await;

    assert_orphaned_on_time(&setup, &mcp, since).await;
}

async fn no_attached_call_is_cancelled_by_other_streams(server: Server) {
    let (clock, setup, mcp) = Plan::of(server).stopped().await;
    let mut attached = setup.start_call(&mcp, 1, "hold", "attached").await;
    attached.head().await;
    for _ in 0..3 {
        let mut call = mcp.call("whole", "echo", json!({ "text": "a" })).await;
        let (_, last) = whole(&mut call).await;
        let mut standalone = mcp.listen().await;
        standalone.head().await;
        let mut shadow = mcp.listen().await;
        shadow.head().await;
        clock.advance(RECONNECT).await;
        standalone.rst();
        shadow.fin();
        whole(&mut mcp.resume(&last.expect("an id")).await).await;
        setup.assert_usable(&mcp).await;
    }
    assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);
    assert_eq!(setup.calls.len(), 1);
    setup.assert_completes("attached", &mut attached).await;
}

/// Makes a whole call and then reopens its stream repeatedly, as EventSource does.
///
/// Returns each stream's events.
async fn reopen_repeatedly(mcp: &Mcp, clock: &StoppedClock) -> Vec<Vec<SseEvent>> {
    let mut call = mcp.call(1, "echo", json!({ "text": "a" })).await;
    let (events, last) = whole(&mut call).await;
    let last = last.expect("an id");
    let mut streams = vec![events];
    for _ in 0..REOPENS {
        clock.advance(REOPEN).await;
        let (events, _) = whole(&mut mcp.resume(&last).await).await;
        streams.push(events);
    }
    streams
}

/// Opens a standalone stream and its shadow, which are replaced every [`RECONNECT`].
///
/// The server sends events on each of them. Returns each stream's events.
async fn replace_repeatedly(setup: &Setup, clock: &StoppedClock) -> Vec<Vec<SseEvent>> {
    let mcp = setup.mcp().await;
    let mut streams = Vec::new();
    let mut last: Option<String> = None;
    for round in 0..4 {
        let mut primary = match &last {
            Some(id) => mcp.resume(id).await,
            None => mcp.listen().await,
        };
        assert_eq!(primary.head().await.status, 200);
        let mut shadow = mcp.listen().await;
        assert_eq!(shadow.head().await.status, 200);
        // The call has no progress token, so its progress is sent on the standalone stream.
        let label = format!("round {round}");
        let arguments = json!({ "label": label, "events": 2 });
        let params = json!({ "name": "chatty", "arguments": arguments });
        let mut call = mcp.request(round, "tools/call", params).await;
        setup.witness.release(&label);
        let (answer, _) = whole(&mut call).await;
        streams.push(answer);
        let mut events = Vec::new();
        loop {
            let event = primary.event().await.expect("the stream stays open");
            last = event.id.clone().or(last);
            let is_last = !event.is_priming() && {
                let params = &event.json()["params"];
                params["progressToken"] == *label && params["progress"] == 2.0
            };
            events.push(event);
            if is_last {
                break;
            }
        }
        streams.push(events);
        streams.push(vec![shadow.event().await.expect("its priming event")]);
        let (primary_marked, shadow_marked) = (primary, shadow);
        primary_marked.fin();
        shadow_marked.rst();
        clock.advance(RECONNECT).await;
        setup.assert_usable(&mcp).await;
    }
    streams
}

/// Returns all events on a stream that ends on its own, and the last id among them.
async fn whole(connection: &mut Connection) -> (Vec<SseEvent>, Option<String>) {
    assert_eq!(connection.head().await.status, 200);
    let mut events = Vec::new();
    let mut last = None;
    while let Some(event) = connection.event().await {
        last = event.id.clone().or(last);
        events.push(event);
    }
    assert!(connection.is_complete(), "the stream has ended properly");
    (events, last)
}

async fn assert_orphaned_on_time(setup: &Setup, mcp: &Mcp, since: tokio::time::Instant) {
    let (outcome, ended) = setup.events.end(mcp, 2).await;
    assert_eq!(outcome, ORPHANED);
    assert!((GRACE..=GRACE + TICK).contains(&(ended - since)));
    assert!(setup.witness.ended("orphan").await.is_cancelled());
}
