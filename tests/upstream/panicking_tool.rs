// A tool panics in a session.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
};
use tokio::time::timeout;

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool","arguments":{}}}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self) -> String {
        panic!("the tool panics on purpose")
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    // SSE comments are timed by the system clock, which is not paused.
    let config = StreamableHttpServerConfig::default().with_sse_keep_alive(None);
    let server = StreamableHttpService::new(|| Ok(Tools), manager, config);
    let session = open(&server).await;

    let headers = [("mcp-session-id", &*session)];
    let call = server.handle(request("POST", &headers, CALL)).await;
    let whole = timeout(Duration::from_secs(60), call.into_body().collect()).await;
    format!("the stream ends within 60 s: {}", whole.is_ok())
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
