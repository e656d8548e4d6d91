// A tool sends progress after its call has been cancelled. The client also has a standalone stream.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use rmcp::{
    RoleServer,
    model::{NumberOrString, ProgressNotificationParam, ProgressToken},
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpService, session::local::LocalSessionManager,
    },
};
use tokio::time::timeout;

const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool",
    "arguments":{},"_meta":{"progressToken":"of-call-1"}}}"#;
const CANCEL: &str =
    r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self, context: RequestContext<RoleServer>) -> String {
        context.ct.cancelled().await;
        let token = ProgressToken(NumberOrString::String("of-call-1".into()));
        let progress = ProgressNotificationParam::new(token, 1.0);
        let _sent = context.peer.notify_progress(progress).await;
        String::new()
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    let server = StreamableHttpService::new(|| Ok(Tools), manager, Default::default());
    let session = open(&server).await;
    let headers = [("mcp-session-id", &*session)];
    let mut standalone = server
        .handle(request("GET", &headers, ""))
        .await
        .into_body();

    let _call = server.handle(request("POST", &headers, CALL)).await;
    server.handle(request("POST", &headers, CANCEL)).await;

    let mut received = String::new();
    while let Ok(frame) = timeout(Duration::from_secs(10), standalone.frame()).await {
        let data = frame.unwrap().unwrap().into_data().unwrap();
        received.push_str(&String::from_utf8_lossy(&data));
    }
    let has_progress = received.contains("of-call-1");
    format!("the standalone stream has progress of the cancelled call: {has_progress}")
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
