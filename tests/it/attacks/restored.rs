//! A session that starts again under its old id numbers its streams from `0/0` again.

use mcp_cancel_on_disconnect::Outcome;

use super::{GRACE, ID, lose_client, try_resume};
use crate::{
    setup::{EventKind, FIRST_EVENT, Plan, SavedSessions, Server, Setup},
    support::*,
};

#[tokio::test]
async fn a_retained_answer_does_not_outlive_the_restore_of_its_session() {
    let (setup, mcp) = saved(Server::Wrapped).client().await;
    complete_detached(&setup, &mcp).await;
    let kept = try_resume(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(kept.contains("done:victim"), "before: {kept}");

    forget(&setup, &mcp).await;
    setup.assert_usable(&mcp).await;

    let kept = try_resume(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(!kept.contains("done:victim"), "after: {kept}");
}

#[tokio::test]
async fn the_first_stream_of_a_restored_session_has_its_own_answer() {
    let (setup, mcp) = saved(Server::Wrapped).client().await;
    complete_detached(&setup, &mcp).await;
    forget(&setup, &mcp).await;

    assert_eq!(setup.cut(&mcp, "new", "new").await, FIRST_EVENT);
    setup.witness.release("new");
    setup.events.ended(&mcp, "new").await;

    let kept = try_resume(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(
        kept.contains("done:new") && !kept.contains("victim"),
        "{kept}"
    );
}

#[tokio::test]
async fn a_retained_answer_does_not_reach_a_restored_session_of_another_client() {
    let setup = saved(Server::Wrapped).start().await;
    let (mcp, attacker) = (setup.mcp().await, setup.mcp().await);
    complete_detached(&setup, &mcp).await;
    forget(&setup, &attacker).await;

    let kept = try_resume(&attacker, FIRST_EVENT).await.expect("a stream");

    assert_eq!(kept, "");
    let kept = try_resume(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(kept.contains("done:victim"), "{kept}");
}

/// With the layer alone, the lost call's event id is also one of the newer call's.
#[tokio::test]
async fn a_resume_after_a_restore_does_not_give_a_call_the_end_of_another() {
    let (clock, setup, mcp) = saved(Server::LayerOnly).stopped().await;
    lose_client(&setup, &mcp).await;
    expire(&setup, &mcp).await;
    assert_eq!(setup.cut(&mcp, "new", "new").await, FIRST_EVENT);

    let mut resumed = mcp.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    for _ in 0..3 {
        clock.advance(GRACE).await;
        setup.assert_usable(&mcp).await;
    }

    assert!(setup.witness.is_running("new"));
    assert!(!setup.tokens.of("new").is_cancelled());
    setup.witness.release("new");
    resumed.assert_done("new").await;
    assert!(setup.witness.ended("new").await.is_completed());
    let of_victim = setup.events.of(&mcp, ID);
    let is_reported_completed = of_victim.contains(&EventKind::Ended(Outcome::Completed));
    assert!(!is_reported_completed, "{of_victim:?}");
    println!(
        "victim {of_victim:?} new {:?}",
        setup.events.of(&mcp, "new")
    );
}

/// The newer call has the same id as the lost one, whose cancellation must not reach it.
#[tokio::test]
async fn the_cancel_of_a_lost_call_does_not_hit_one_with_its_id_in_the_restored_session() {
    let (clock, setup, mcp) = saved(Server::LayerOnly).stopped().await;
    lose_client(&setup, &mcp).await;
    expire(&setup, &mcp).await;
    let mut call = setup.start_call(&mcp, ID, "hold", "new").await;

    for _ in 0..3 {
        clock.advance(GRACE).await;
        setup.assert_usable(&mcp).await;
    }

    setup.assert_completes("new", &mut call).await;
}

fn saved(server: Server) -> Plan {
    Plan::with_grace(server).saving(SavedSessions::default())
}

/// Lets a call complete while its client is disconnected.
async fn complete_detached(setup: &Setup, mcp: &Mcp) {
    lose_client(setup, mcp).await;
    setup.witness.release("victim");
    setup.events.ended(mcp, ID).await;
}

/// Ends the lost call's session, as its age limit would, and waits until rmcp has closed it.
///
/// The session can then be restored.
async fn expire(setup: &Setup, mcp: &Mcp) {
    let id = mcp.session_id().expect("a session");
    let sessions = &setup.sessions.local().sessions;
    let handle = sessions.read().await.get(id).cloned();
    let closed = handle.expect("the session exists").close().await;
    closed.expect("the session is open");
    // rmcp does not close it until its handlers have returned.
    setup.witness.release("victim");
    setup.witness.ended("victim").await;
    let forgotten = async {
        while sessions.read().await.contains_key(id) {
            tokio::task::yield_now().await;
        }
    };
    within("rmcp to close the session", forgotten).await;
}

/// Removes the session from this process, as if another process had served it last.
async fn forget(setup: &Setup, mcp: &Mcp) {
    let id = mcp.session_id().expect("a session");
    let mut sessions = setup.sessions.local().sessions.write().await;
    sessions.remove(id).expect("the session exists");
}
