// A tool takes longer than `SessionConfig::keep_alive`, while its client stays connected and keeps reading.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
};
use tokio::time::{Instant, sleep};

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool","arguments":{}}}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self) -> String {
        sleep(Duration::from_secs(600)).await;
        "the answer".to_owned()
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    // SSE comments are timed by the system clock, which is not paused.
    let config = StreamableHttpServerConfig::default().with_sse_keep_alive(None);
    let server = StreamableHttpService::new(|| Ok(Tools), manager, config);
    let session = open(&server).await;

    let headers = [("mcp-session-id", &*session)];
    let start = Instant::now();
    let call = server.handle(request("POST", &headers, CALL)).await;
    let events = call.into_body().collect().await.unwrap().to_bytes();
    let has_answer = String::from_utf8_lossy(&events).contains("the answer");
    format!(
        "the stream ends after {} s, with the answer: {has_answer}",
        start.elapsed().as_secs()
    )
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
