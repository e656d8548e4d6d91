//! An event store that all instances share.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use mcp_cancel_on_disconnect::{CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage, local::LocalSessionManager,
};
use serde_json::{Value, json};
use test_support::within;

use super::{
    node::{Node, Setup, pass},
    steps::{SECOND, directory},
};
use crate::directory::faulty::Faulty;

/// Events in memory, under ids that do not reveal their stream.
#[derive(Clone, Default)]
struct MemoryStore(Arc<Mutex<BTreeMap<usize, (String, ServerSseMessage)>>>);

#[async_trait::async_trait]
impl EventStore for MemoryStore {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut events = self.0.lock().unwrap();
        let number = events.len();
        let id = format!("event-{number}");
        let mut event = event.clone();
        event.event_id = Some(id.clone());
        events.insert(number, (stream.to_owned(), event));
        Ok(id)
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let number: usize = last.strip_prefix("event-").unwrap_or_default().parse()?;
        let events = self.0.lock().unwrap();
        let (stream, _) = events.get(&number).ok_or("no such event")?;
        let later = events.range(number + 1..).map(|(_, event)| event);
        let later = later.filter(|(its_stream, _)| its_stream == stream);
        let later: Vec<_> = later.map(|(_, event)| event.clone()).collect();
        Ok(Box::pin(futures_util::stream::iter(later)))
    }
}

/// Starts an instance whose sessions use this store.
async fn start(directory: &Faulty, store: &MemoryStore) -> Node {
    let manager = LocalSessionManager::default().with_event_store(Arc::new(store.clone()));
    let setup = Setup {
        manager: CancellableSessionManager::new(manager).event_id_key("a key of all instances"),
        grace: Grace::After(30 * SECOND),
        ..Setup::default()
    };
    setup.start(directory).await
}

/// Returns the only message that a client gets when it resumes through another instance.
///
/// By then its call has ended if `is_ended`, and the owner has been killed if `is_killed`.
async fn resumed(is_ended: bool, is_killed: bool) -> Option<Value> {
    let (directory, store) = (directory(), MemoryStore::default());
    let mut a = start(&directory, &store).await;
    let b = start(&directory, &store).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    if is_ended {
        a.witness.release("a");
        a.witness.ended("a").await;
        pass(SECOND).await;
    }
    if is_killed {
        a.kill_and_expire().await;
        pass(2 * SECOND).await;
    }
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    let mut messages = within("messages", resumed.messages()).await;
    assert!(messages.len() < 2, "{messages:?}");
    messages.pop()
}

#[tokio::test]
async fn a_client_that_resumes_gets_what_the_store_or_the_directory_has() {
    // As with a single instance, a running call's stored events end without its answer, so the client resumes again.
    assert_eq!(resumed(false, false).await, None);
    for is_killed in [false, true] {
        let answer = resumed(true, is_killed).await.unwrap();
        assert!(
            answer["id"] == 1 && answer["result"].is_object(),
            "{answer}"
        );
    }
    // README, "Limits": the store is not read for a call that was lost with its instance.
    let error = resumed(false, true).await.unwrap();
    assert_eq!(
        (&error["id"], &error["error"]["code"]),
        (&json!(1), &json!(-32603))
    );
}
