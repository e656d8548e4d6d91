//! A session that starts anew under its old id counts its streams from `0/0` again.

use std::sync::Arc;

use super::{ID, lost, resumed, with_grace};
use crate::{
    setup::{SavedSessions, Server, Setup},
    support::*,
};

const FIRST_EVENT: &str = "0/0";

#[tokio::test]
async fn a_kept_answer_does_not_outlive_the_restore_of_its_session() {
    let setup = saved().await;
    let mcp = setup.mcp().await;
    answered(&setup, &mcp).await;
    let kept = resumed(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(kept.contains("done:victim"), "before: {kept}");

    forget(&setup, &mcp).await;
    setup.assert_usable(&mcp).await;

    let kept = resumed(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(!kept.contains("done:victim"), "after: {kept}");
}

#[tokio::test]
async fn the_first_stream_of_a_restored_session_brings_its_own_answer() {
    let setup = saved().await;
    let mcp = setup.mcp().await;
    answered(&setup, &mcp).await;
    forget(&setup, &mcp).await;

    let mut call = setup.start_call(&mcp, "new", "hold", "new").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    assert_eq!(first.id.as_deref(), Some(FIRST_EVENT));
    call.fin();
    setup.events.detached(&mcp, "new").await;
    setup.witness.release("new");
    setup.events.ended(&mcp, "new").await;

    let kept = resumed(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(
        kept.contains("done:new") && !kept.contains("victim"),
        "{kept}"
    );
}

#[tokio::test]
async fn a_kept_answer_reaches_no_restored_session_of_another_client() {
    let setup = saved().await;
    let (mcp, stranger) = (setup.mcp().await, setup.mcp().await);
    answered(&setup, &mcp).await;
    forget(&setup, &stranger).await;

    let kept = resumed(&stranger, FIRST_EVENT).await.expect("a stream");

    assert_eq!(kept, "");
    let kept = resumed(&mcp, FIRST_EVENT).await.expect("a stream");
    assert!(kept.contains("done:victim"), "{kept}");
}

async fn saved() -> Setup {
    let store = Arc::new(SavedSessions::default());
    let plan = with_grace(Server::Wrapped).config(|mut config| {
        config.session_store = Some(store);
        config
    });
    plan.start().await
}

/// A call has ended while its client was away.
async fn answered(setup: &Setup, mcp: &Mcp) {
    lost(setup, mcp).await;
    setup.witness.release("victim");
    setup.events.ended(mcp, ID).await;
}

/// As if another process had the session last.
async fn forget(setup: &Setup, mcp: &Mcp) {
    let id = mcp.session_id().expect("a session");
    let mut sessions = setup.sessions.local().sessions.write().await;
    sessions.remove(id).expect("it lives");
}
