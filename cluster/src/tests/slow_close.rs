//! A session manager that takes longer to close a session than the cluster waits.

use std::{sync::Arc, time::Duration};

use futures_util::Stream;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{SessionId, local::LocalSessionManager},
};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Tools, Witness, forward_sessions, router, serve, within};
use tokio::time::sleep;

use super::{
    node::{hash, pass},
    steps::{SECOND, directory, join_as, unreachable_owner},
};
use crate::membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD};

/// Closes sessions like rmcp's own manager, but then takes this long, as if updating a database.
struct SlowClose(LocalSessionManager, Duration);

impl SessionManager for SlowClose {
    forward_sessions!(|this| this.0 =>
        create_session, initialize_session, has_session, create_stream, accept_message,
        create_standalone_stream, resume, restore_session,
    );

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.0.close_session(id).await?;
        sleep(self.1).await;
        Ok(())
    }
}

/// A session is relinquished, and the next request restores it on the same instance while closing the old copy is taking 8 s. The call
/// continues, and its client can resume.
#[tokio::test]
async fn a_session_that_was_restored_while_its_previous_close_took_long_stays_open() {
    let directory = directory();
    let cluster = join_as(unreachable_owner(), &directory);
    let manager = SlowClose(LocalSessionManager::default(), 8 * SECOND);
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::new(manager)));
    let mut config = Mode::Session.config().with_sse_keep_alive(None);
    config.session_store = Some(Arc::new(cluster.clone()));
    let witness = Witness::new();
    let service = Tools::new(&witness).service_with(config, sessions);
    let layer = cluster.protect(CancelOnDisconnectLayer::new());
    let served = serve(router(service).layer(layer).layer(cluster.layer())).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let local = &cluster.router().sessions;
    local.relinquish_to_owner(hash(&mcp), unreachable_owner());
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    // The instance waits 5 s for the session to close.
    pass(6 * SECOND).await;
    assert_eq!(within("a response head", call.head()).await.status, 200);
    let last_event_id = within("an event", call.event()).await.unwrap().id.unwrap();
    within("the call", witness.started("a")).await;
    assert!(local.is_open(hash(&mcp)));
    pass(4 * SECOND).await;
    assert!(local.is_open(hash(&mcp)), "the old copy has been closed");
    assert_eq!(local.has_params(mcp.session_id().unwrap()), Some(true));
    call.fin();
    pass(SECOND).await;
    let mut resumed = mcp.resume(&last_event_id).await;
    assert_eq!(within("a response head", resumed.head()).await.status, 200);
    witness.release("a");
    let messages = within("an answer", resumed.messages()).await;
    assert!(
        messages.last().unwrap()["result"].is_object(),
        "{messages:?}"
    );
}
