// A client resumes with an event id from another client's session. Both sessions use an event store.

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

include!("store.rs");

include!("client.rs");
