//! A client hangs up in the middle of a call.

use std::sync::Arc;

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::session::local::SessionConfig;
use serde_json::json;

use crate::support::*;

#[tokio::test]
async fn a_wrapped_session_call_is_cancelled() {
    let witness = Witness::new();
    let sessions = Arc::new(CancellableSessionManager::local(SessionConfig::default()));
    let service = Tools::new(&witness).service(Mode::Session, sessions);
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let calls = layer.calls();
    let served = serve(router(service).layer(layer)).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    witness.started("a").await;
    call.head().await;
    assert_eq!(calls.len(), 1);
    call.fin();
    assert!(witness.ended("a").await.is_cancelled());
    assert!(calls.is_empty());
}
