// Two requests in a stored session arrive at a server that has to restore it. The first one's client disconnects.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService,
        session::{SessionState, SessionStore, SessionStoreError, local::LocalSessionManager},
    },
};
use tokio::time::{sleep, timeout};

const PING: &str = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

struct Tools;

impl ServerHandler for Tools {}

#[derive(Default)]
struct Store(Mutex<HashMap<String, SessionState>>);

#[async_trait::async_trait]
impl SessionStore for Store {
    async fn load(&self, id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        sleep(Duration::from_secs(1)).await;
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
    let mut config = StreamableHttpServerConfig::default();
    config.session_store = Some(Arc::new(Store::default()));
    let [first, second] = [config.clone(), config].map(|config| {
        StreamableHttpService::new(
            || Ok(Tools),
            Arc::new(LocalSessionManager::default()),
            config,
        )
    });
    let session = open(&first).await;
    let ping = || second.handle(request("POST", &[("mcp-session-id", &*session)], PING));

    // The first client disconnects after 0.5 s, while the store is still loading the session.
    let (disconnected, waiting) = tokio::join!(timeout(Duration::from_millis(500), ping()), ping());
    let later = ping().await;
    format!(
        "the first disconnects: {}, the second gets {}, a later one {}",
        disconnected.is_err(),
        waiting.status(),
        later.status(),
    )
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    println!("{}", observe().await);
}

include!("client.rs");
