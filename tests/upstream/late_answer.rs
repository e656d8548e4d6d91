// A session call is answered after its client has disconnected and before it resumes.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use rmcp::transport::streamable_http_server::{
    StreamableHttpService, session::local::LocalSessionManager,
};
use tokio::time::sleep;

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool","arguments":{}}}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self) -> String {
        sleep(Duration::from_secs(2)).await;
        "the answer".to_owned()
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    let server = StreamableHttpService::new(|| Ok(Tools), manager, Default::default());
    let session = open(&server).await;
    let headers = [("mcp-session-id", &*session)];

    let call = server.handle(request("POST", &headers, CALL)).await;
    drop(call); // The client disconnects while the tool is running.
    sleep(Duration::from_secs(4)).await; // The tool answers, well within `completed_cache_ttl`.

    let headers = [("mcp-session-id", &*session), ("last-event-id", "0/0")];
    let resumed = server.handle(request("GET", &headers, "")).await;
    let status = resumed.status();
    let events = resumed.into_body().collect().await.unwrap().to_bytes();
    format!("resumed: {status}, {events:?}")
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
