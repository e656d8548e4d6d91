// A client resumes with an event id of another client's session. Both sessions use an event store.

use std::sync::{Arc, Mutex};

use http_body_util::BodyExt as _;
use rmcp::transport::streamable_http_server::{
    StreamableHttpService,
    session::{
        EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
        local::LocalSessionManager,
    },
};

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool","arguments":{}}}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self) -> String {
        "a secret".to_owned()
    }
}

#[derive(Default)]
struct Store(Mutex<Vec<(String, ServerSseMessage)>>);

#[async_trait::async_trait]
impl EventStore for Store {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut events = self.0.lock().unwrap();
        let id = format!("event-{}", events.len());
        let mut event = event.clone();
        event.event_id = Some(id.clone());
        events.push((stream.to_owned(), event));
        Ok(id)
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let last: usize = last.strip_prefix("event-").ok_or("unknown id")?.parse()?;
        let events = self.0.lock().unwrap().clone();
        let stream = events.get(last).ok_or("unknown id")?.0.clone();
        let later = events.into_iter().skip(last + 1);
        let later = later.filter(move |(of, _)| *of == stream);
        Ok(Box::pin(futures_util::stream::iter(
            later.map(|(_, event)| event),
        )))
    }
}

pub async fn observe() -> String {
    let manager = LocalSessionManager::default().with_event_store(Arc::new(Store::default()));
    let server = StreamableHttpService::new(|| Ok(Tools), Arc::new(manager), Default::default());
    let (owner, other) = (open(&server).await, open(&server).await);

    let headers = [("mcp-session-id", &*owner)];
    let call = server.handle(request("POST", &headers, CALL)).await;
    call.into_body().collect().await.unwrap();

    let headers = [("mcp-session-id", &*other), ("last-event-id", "event-0")];
    let resumed = server.handle(request("GET", &headers, "")).await;
    let events = resumed.into_body().collect().await.unwrap().to_bytes();
    let has_secret = String::from_utf8_lossy(&events).contains("a secret");
    format!("the other session gets the answer: {has_secret}")
}

#[tokio::main]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
