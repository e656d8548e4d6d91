//! A client disconnects while its call keeps running. The layer reads what the call still sends.

use std::sync::Arc;

use mcp_cancel_on_disconnect::{Grace, Outcome};
use rmcp::{
    RoleServer,
    model::ProgressNotificationParam,
    service::{RequestContext, ServiceError},
};
use tokio::sync::Notify;

use crate::{
    setup::{EventKind, Plan, Scripted, Server, Setup, for_servers},
    support::*,
};

/// More than twice the 16 events that fit into a stream's channel.
const MANY: u32 = 40;

for_servers!(sessions {
    a_call_that_may_run_on_ends_by_itself_and_never_fires_its_token,
    a_call_that_sends_more_than_a_channel_holds_never_blocks_its_session,
});

async fn a_call_that_may_run_on_ends_by_itself_and_never_fires_its_token(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Never).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;

    call.fin();

    assert_eq!(setup.events.detached(&mcp, 1).await.0, None);
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert!(!setup.tokens.of("a").is_cancelled());
    assert_ended(&setup, &mcp).await;
}

async fn a_call_that_sends_more_than_a_channel_holds_never_blocks_its_session(server: Server) {
    let cue = Arc::new(Notify::new());
    let setup = Plan::of(server).grace(Grace::Never);
    let setup = setup.start_scripted(chattering_after(cue.clone())).await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "any", "a").await;
    call.head().await;
    call.fin();
    setup.events.detached(&mcp, 1).await;
    setup.exchanges.over_for("a").await;

    cue.notify_one();

    assert!(setup.witness.ended("a").await.is_completed());
    assert_ended(&setup, &mcp).await;
    // Every later call in the session passes through the same session worker.
    let mut next = setup.start_call(&mcp, 2, "any", "b").await;
    cue.notify_one();
    assert!(next.answer().await.is_some());
}

/// Only the wrapper sees a call end if nothing is reading its stream.
async fn assert_ended(setup: &Setup, mcp: &Mcp) {
    if setup.server == Server::Wrapped {
        assert_eq!(setup.events.ended(mcp, 1).await, Outcome::Completed);
        assert!(setup.calls.is_empty());
        let expected = [
            EventKind::Started,
            EventKind::Detached(None),
            EventKind::Ended(Outcome::Completed),
        ];
        assert_eq!(setup.events.of(mcp, 1), expected);
    } else {
        assert_eq!(
            setup.events.of(mcp, 1),
            [EventKind::Started, EventKind::Detached(None)]
        );
    }
}

/// A tool that waits for its cue, sends many events and then answers.
fn chattering_after(cue: Arc<Notify>) -> Scripted {
    Scripted::new(move |context| {
        let cue = cue.clone();
        async move {
            cue.notified().await;
            for event in 1..=MANY {
                let sent = progress(&context, event).await;
                sent.expect("the session accepts it");
            }
            Ok("done".to_owned())
        }
    })
}

async fn progress(context: &RequestContext<RoleServer>, event: u32) -> Result<(), ServiceError> {
    let token = context.meta.get_progress_token().expect("a progress token");
    let progress = ProgressNotificationParam::new(token, f64::from(event));
    context.peer.notify_progress(progress).await
}
