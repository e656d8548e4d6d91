// An application closes one of its manager's sessions while a tool is running. The next request restores the session from the store.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use rmcp::transport::streamable_http_server::{
    SessionManager, StreamableHttpServerConfig, StreamableHttpService,
    session::{SessionState, SessionStore, SessionStoreError, local::LocalSessionManager},
};
use tokio::time::sleep;

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"tool","arguments":{}}}"#;
const PING: &str = r#"{"jsonrpc":"2.0","id":2,"method":"ping"}"#;

struct Tools;

#[rmcp::tool_router(server_handler)]
impl Tools {
    #[rmcp::tool]
    async fn tool(&self) -> String {
        sleep(Duration::from_secs(60)).await;
        String::new()
    }
}

#[derive(Default)]
struct Store(Mutex<HashMap<String, SessionState>>);

#[async_trait::async_trait]
impl SessionStore for Store {
    async fn load(&self, id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        Ok(self.0.lock().unwrap().get(id).cloned())
    }

    async fn store(&self, id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        self.0.lock().unwrap().insert(id.to_owned(), state.clone());
        Ok(())
    }

    async fn delete(&self, id: &str) -> Result<(), SessionStoreError> {
        self.0.lock().unwrap().remove(id);
        Ok(())
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(LocalSessionManager::default());
    let mut config = StreamableHttpServerConfig::default();
    config.session_store = Some(Arc::new(Store::default()));
    let server = StreamableHttpService::new(|| Ok(Tools), manager.clone(), config);
    let session = open(&server).await;
    let headers = [("mcp-session-id", &*session)];

    let _call = server.handle(request("POST", &headers, CALL)).await;
    let id = session.as_str().into();
    manager.close_session(&id).await.unwrap();
    let restored = server
        .handle(request("POST", &headers, PING))
        .await
        .status();
    let before = manager.has_session(&id).await.unwrap();
    sleep(Duration::from_secs(6)).await;
    let after = manager.has_session(&id).await.unwrap();
    format!("restored: {restored}, open: {before}, open after 6 s: {after}")
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
