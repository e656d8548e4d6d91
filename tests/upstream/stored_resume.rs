// A client resumes a call in flight, in a session that uses an event store.

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
        std::future::pending().await
    }
}

pub async fn observe() -> String {
    let manager = LocalSessionManager::default().with_event_store(Arc::new(Store::default()));
    let server = StreamableHttpService::new(|| Ok(Tools), Arc::new(manager), Default::default());
    let session = open(&server).await;

    let headers = [("mcp-session-id", &*session)];
    let call = server.handle(request("POST", &headers, CALL)).await;
    let mut call = call.into_body();
    let priming = call.frame().await.unwrap().unwrap();
    let priming = String::from_utf8_lossy(priming.data_ref().unwrap()).into_owned();
    let id = priming.lines().find_map(|line| line.strip_prefix("id: "));
    drop(call); // The client disconnects while the tool is running.

    let headers = [
        ("mcp-session-id", &*session),
        ("last-event-id", id.unwrap()),
    ];
    let resumed = server.handle(request("GET", &headers, "")).await;
    let status = resumed.status();
    let events = resumed.into_body().collect().await.unwrap().to_bytes();
    format!("resumed: {status}, {events:?}")
}

#[tokio::main]
async fn main() {
    println!("{}", observe().await);
}

include!("store.rs");

include!("client.rs");
