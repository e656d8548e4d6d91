//! A client disconnects and may resume within a grace period.
//!
//! The clock is stopped and only moves when a test advances it, so the bounds are exact to the millisecond to which
//! tokio's timers round.

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use http::{Method, StatusCode};
use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use tokio::sync::mpsc;

use crate::{
    setup::{
        EventKind, FIRST_EVENT, GRACE, ORPHANED, Plan, Scripted, Server, Setup, StoppedClock, TICK,
        for_servers,
    },
    support::*,
};

/// The id of the first event on its second stream.
const SECOND_STREAM: &str = "0/1";

for_servers!(sessions {
    a_call_is_cancelled_as_an_orphan_when_its_grace_is_over_and_not_before,
    the_server_is_notified_that_the_client_did_not_resume,
    a_resume_within_the_grace_keeps_the_call_and_delivers_its_answer,
    a_resume_that_is_refused_does_not_keep_the_call,
    a_resume_of_another_session_does_not_keep_the_call,
    a_standalone_stream_does_not_keep_the_call,
});

async fn a_call_is_cancelled_as_an_orphan_when_its_grace_is_over_and_not_before(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    let mut attached = setup.start_call(&mcp, 2, "hold", "attached").await;
    let (grace, since) = setup.events.detached(&mcp, 1).await;
    assert_eq!(grace, Some(GRACE));

    clock.advance(GRACE - TICK).await;

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    assert!(!setup.tokens.of("a").is_cancelled());
    let so_far = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(&mcp, 1), so_far);

    clock.advance(TICK * 2).await;

    let (outcome, ended) = setup.events.end(&mcp, 1).await;
    assert_eq!(outcome, ORPHANED);
    assert!((GRACE..=GRACE + TICK).contains(&(ended - since)));
    assert!(setup.witness.ended("a").await.is_cancelled());
    let token = setup.tokens.of("a");
    assert_eq!(token.reason(), Some(CancelReason::Orphaned));
    assert_eq!(setup.calls.len(), 1, "only the attached call remains");
    setup.assert_completes("attached", &mut attached).await;
}

async fn the_server_is_notified_that_the_client_did_not_resume(server: Server) {
    let clock = StoppedClock::stop();
    let (cancels, mut received) = mpsc::unbounded_channel();
    let handler = Scripted::new(|context| async move {
        context.ct.cancelled().await;
        Ok("unread".to_owned())
    });
    let handler = handler.on_cancelled(cancels);
    let setup = Plan::with_grace(server).start_scripted(handler).await;
    let mcp = setup.mcp().await;
    setup.cut(&mcp, 1, "a").await;

    clock.advance(GRACE + TICK).await;

    let cancelled = within("notifications/cancelled", received.recv()).await;
    let reason = cancelled.expect("the server is running").reason;
    let words = "client did not resume within the grace period";
    assert_eq!(reason.as_deref(), Some(words));
}

#[tokio::test]
async fn a_call_that_completes_within_its_grace_is_completed_and_not_cancelled() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;

    setup.witness.release("a");

    assert!(setup.witness.ended("a").await.is_completed());
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(setup.calls.is_empty());
    clock.advance(GRACE).await;
    setup.assert_usable(&mcp).await;
    let expected = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        EventKind::Ended(Outcome::Completed),
    ];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn a_resume_within_the_grace_keeps_the_call_and_delivers_its_answer(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE - TICK).await;

    let mut resumed = mcp.resume(FIRST_EVENT).await;

    assert_eq!(resumed.head().await.status, 200);
    clock.advance(GRACE * 3).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.assert_completes("a", &mut resumed).await;
    let cancelled = |kind: &EventKind| matches!(kind, EventKind::Ended(Outcome::Cancelled(_)));
    assert!(!setup.events.of(&mcp, 1).iter().any(cancelled));
}

async fn a_resume_that_is_refused_does_not_keep_the_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server)
        .inside(refusing_resumes)
        .stopped()
        .await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;

    let refused = mcp.resume(FIRST_EVENT).await.head().await;

    assert_eq!(refused.status, 401);
    assert_orphaned_when_grace_ends(&setup, &mcp, &clock).await;
}

async fn a_resume_of_another_session_does_not_keep_the_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    let other_client = setup.mcp().await;
    setup
        .start_call(&other_client, 1, "hold", "other")
        .await
        .fin();
    clock.advance(GRACE / 2).await;

    let mut resumed = other_client.resume(FIRST_EVENT).await;

    assert_eq!(resumed.head().await.status, 200);
    assert_orphaned_when_grace_ends(&setup, &mcp, &clock).await;
}

/// With the layer alone, this would keep the call.
///
/// The layer does not know which call an event id belongs to.
#[tokio::test]
async fn a_resume_of_another_call_of_the_session_does_not_keep_a_wrapped_call() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    let other = setup.start_call(&mcp, 2, "hold", "other").await;
    other.fin();
    setup.events.detached(&mcp, 2).await;
    clock.advance(GRACE / 2).await;

    let mut resumed = mcp.resume(SECOND_STREAM).await;

    assert_eq!(resumed.head().await.status, 200);
    assert_orphaned_when_grace_ends(&setup, &mcp, &clock).await;
    setup.assert_completes("other", &mut resumed).await;
}

async fn a_standalone_stream_does_not_keep_the_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;

    let mut standalone = mcp.listen().await;

    assert_eq!(standalone.head().await.status, 200);
    assert_orphaned_when_grace_ends(&setup, &mcp, &clock).await;
}

/// Asserts that the call is orphaned after the rest of its grace period.
///
/// Half of the grace period has already passed.
async fn assert_orphaned_when_grace_ends(setup: &Setup, mcp: &Mcp, clock: &StoppedClock) {
    setup.assert_usable(mcp).await;
    assert!(setup.witness.is_running("a"));
    clock.advance(GRACE / 2 + TICK).await;
    assert_eq!(setup.events.ended(mcp, 1).await, ORPHANED);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

fn refusing_resumes(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        if request.method() == Method::GET {
            StatusCode::UNAUTHORIZED.into_response()
        } else {
            next.run(request).await
        }
    }))
}
