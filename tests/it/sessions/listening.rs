//! Sessions whose clients only listen.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use mcp_cancel_on_disconnect::CancellableSessionManager;
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
};
use serde_json::json;

use crate::setup::{Plan, Server, Store};

const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A store that also delivers later events, so that a replay does not end.
#[derive(Default)]
struct Live(Store);

#[async_trait::async_trait]
impl EventStore for Live {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        self.0.store_event(stream, event).await
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let replayed = self.0.replay_events_after(last).await?;
        Ok(Box::pin(replayed.chain(stream::pending())))
    }
}

#[tokio::test]
async fn a_session_is_closed_although_a_standalone_stream_is_open() {
    assert_closed(false).await;
}

#[tokio::test]
async fn a_session_is_closed_although_a_standalone_stream_has_been_resumed() {
    assert_closed(true).await;
}

/// The session manager ignores standalone streams, and the client of the session only listens.
async fn assert_closed(resumes: bool) {
    let plan = Plan::of(Server::Wrapped);
    let plan = plan.sessions(|local| local.with_event_store(Arc::new(Live::default())));
    let plan = plan.wrap(|local| {
        CancellableSessionManager::from_local(local)
            .idle_timeout(IDLE_TIMEOUT)
            .ignore_standalone_streams()
    });
    let (clock, setup, mcp) = plan.stopped().await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    // Without a progress token, the event is sent on the standalone stream.
    let params = json!({ "name": "chatty", "arguments": { "label": "a", "events": 1 } });
    let mut call = mcp.request(1, "tools/call", params).await;
    let id = loop {
        if let Some(id) = standalone.event().await.expect("an event").id {
            break id;
        }
    };
    setup.witness.release("a");
    call.answer().await.expect("an answer");
    if resumes {
        standalone.fin();
        standalone = mcp.resume(&id).await;
        assert_eq!(standalone.head().await.status, 200);
    }

    clock.advance(3 * IDLE_TIMEOUT).await;

    let status = mcp.notify("notifications/initialized", json!({})).await;
    assert_eq!(status, 404);
    drop(standalone);
}
