// A client does not read one call's stream, and another call in its session gets no response.

use std::{sync::Arc, time::Duration};

use rmcp::{
    RoleServer,
    model::{NumberOrString, ProgressNotificationParam, ProgressToken},
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpService, session::local::LocalSessionManager,
    },
};
use tokio::time::{sleep, timeout};

const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool",
    "arguments":{},"_meta":{"progressToken":"of-call-1"}}}"#;
const PING: &str = r#"{"jsonrpc":"2.0","id":2,"method":"ping"}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self, context: RequestContext<RoleServer>) -> String {
        for step in 0..100 {
            let token = ProgressToken(NumberOrString::String("of-call-1".into()));
            let progress = ProgressNotificationParam::new(token, step.into());
            let _sent = context.peer.notify_progress(progress).await;
        }
        String::new()
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    let server = StreamableHttpService::new(|| Ok(Tools), manager, Default::default());
    let session = open(&server).await;
    let headers = [("mcp-session-id", &*session)];
    let ping = || {
        let ping = server.handle(request("POST", &headers, PING));
        timeout(Duration::from_secs(60), ping)
    };

    let unread = server.handle(request("POST", &headers, CALL)).await;
    sleep(Duration::from_secs(1)).await;
    let meanwhile = ping().await.is_ok();
    drop(unread);
    let afterwards = ping().await.is_ok();
    format!("a ping has a response: {meanwhile}, once the stream is dropped: {afterwards}")
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
