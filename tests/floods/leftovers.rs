//! Memory used by ended streams and deleted sessions. It must be freed even though their timers expire
//! much later.

use std::{sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::transport::streamable_http_server::{SessionManager as _, session::local::SessionConfig};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Tools, Witness, router, serve};

use crate::{Growth, KIB, run_alone};

const HOUR: Duration = Duration::from_secs(60 * 60);

const MANY: usize = 2_000;

/// Less than the smallest possible allocation for each of them.
const NOTHING: usize = MANY * 8;

#[test]
fn ended_streams_keep_no_state_until_their_stall_timeout() {
    run_alone(async || {
        let witness = Witness::new();
        let layer = CancelOnDisconnectLayer::new().stall_timeout(HOUR);
        // Without sessions, no answer is retained.
        let sessions = CancellableSessionManager::local(SessionConfig::default());
        let service = Tools::new(&witness).service(Mode::StatelessSse, Arc::new(sessions));
        let served = serve(router(service).layer(layer)).await;
        let mcp = Mcp::stateless(served.addr, PATH);
        let calls = async |count: usize| {
            for id in 0..count {
                let mut call = mcp.call(id, "echo", json!({ "text": "a" })).await;
                assert!(call.answer().await.is_some());
            }
        };
        calls(100).await;
        let growth = Growth::since_now();
        calls(MANY).await;
        growth.assert_below(NOTHING, "streams that have ended");
    });
}

#[test]
fn deleted_sessions_keep_no_state_until_their_idle_timeout() {
    run_alone(async || {
        let manager = CancellableSessionManager::local(SessionConfig::default());
        let manager = manager.idle_timeout(HOUR);
        let sessions = async |count: usize| {
            for _ in 0..count {
                let (id, transport) = manager.create_session().await.expect("a session");
                drop(transport);
                manager.close_session(&id).await.expect("it is closed");
                // Lets the session's worker exit.
                tokio::task::yield_now().await;
            }
        };
        sessions(100).await;
        let growth = Growth::since_now();
        sessions(MANY).await;
        growth.assert_below(NOTHING + 16 * KIB, "sessions that were deleted");
    });
}
