//! Calls that neither a message nor a token could stop. They are not reported as cancelled.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome};

use crate::{foreign::Foreign, log::number};

#[tokio::test]
async fn a_call_that_only_the_end_of_its_stream_stops_is_abandoned_and_not_cancelled() {
    let foreign = Foreign::with(Grace::Auto);
    for version in [None, Some("2025-06-18")] {
        drop(foreign.call_without_session(7, version).await);
    }
    let abandoned = Outcome::Abandoned(CancelReason::ClientDisconnected);
    assert_eq!(foreign.log.ends(&number(7)), [abandoned, abandoned]);
    assert_eq!(foreign.log.cancelled(), []);
    assert!(foreign.layer.calls().is_empty());
}

/// A handler only counts as one that stops with its token if it queries the token.
#[tokio::test]
async fn a_token_that_is_only_logged_does_not_count_as_observed() {
    let foreign = Foreign::with(Grace::Auto);
    let stream = foreign.call_without_session(7, None).await;
    assert!(format!("{:?}", foreign.token()).contains("reason: None"));
    drop(stream);
    let abandoned = Outcome::Abandoned(CancelReason::ClientDisconnected);
    assert_eq!(foreign.log.ends(&number(7)), [abandoned]);

    let foreign = Foreign::with(Grace::Auto);
    let stream = foreign.call_without_session(7, None).await;
    assert!(!foreign.token().is_cancelled());
    drop(stream);
    let cancelled = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(foreign.log.ends(&number(7)), [cancelled]);
}

/// In that revision, ending the stream is how a client cancels.
#[tokio::test]
async fn a_call_of_2026_07_28_is_cancelled_by_the_end_of_its_stream() {
    let foreign = Foreign::with(Grace::Auto);
    drop(foreign.call_without_session(7, Some("2026-07-28")).await);
    let cancelled = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(foreign.log.ends(&number(7)), [cancelled]);
}

/// The layer alone cannot know whether another server shares its store with this one.
#[tokio::test(start_paused = true)]
async fn a_session_call_whose_events_may_be_stored_gets_a_grace_behind_the_layer_alone() {
    let foreign = Foreign::with(Grace::Auto);
    let mut stream = foreign.call(7).await;
    foreign.send_event("id: 6f1c-0001\ndata:\n\n");
    Foreign::frame(&mut stream).await;
    drop(stream);
    tokio::time::sleep(Duration::from_secs(19)).await;
    assert_eq!(foreign.log.ends(&number(7)), []);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(foreign.log.ends(&number(7)), [orphaned]);
}

/// The specification forbids reusing an id.
///
/// A client that does so must still keep its new call.
#[tokio::test]
async fn a_replayed_cancel_does_not_hit_a_new_call_with_the_same_id() {
    let foreign = Foreign::with(Grace::Immediate);
    drop(foreign.call(7).await);
    let again = foreign.call(7).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(foreign.cancels(), 0);
    drop(again);
    while foreign.cancels() == 0 {
        tokio::task::yield_now().await;
    }
}
