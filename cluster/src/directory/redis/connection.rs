//! A connection to the engine, which comes back by itself.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use redis::{
    Client, RedisError,
    aio::{ConnectionManager, ConnectionManagerConfig},
};

use crate::directory::LIMIT;

/// How long the engine is tried again after at most, when it is away: 500 ms. By default it would be seen 5 s late.
const MAX_DELAY: Duration = Duration::from_millis(500);

/// A connection that begins with the first command.
pub(super) struct Connection {
    client: Client,
    /// Timeout of a command.
    limit: Duration,
    manager: Mutex<ConnectionManager>,
}

// === impl Connection ===

impl Connection {
    pub(super) fn new(client: Client, limit: Duration) -> Result<Self, RedisError> {
        let manager = Mutex::new(connect(&client, limit)?);
        Ok(Self {
            client,
            limit,
            manager,
        })
    }

    pub(super) fn get(&self) -> ConnectionManager {
        self.manager().clone()
    }

    /// Has the next command begin a new one.
    pub(super) fn renew(&self) {
        if let Ok(manager) = connect(&self.client, self.limit) {
            *self.manager() = manager;
        }
    }

    fn manager(&self) -> MutexGuard<'_, ConnectionManager> {
        self.manager.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn connect(client: &Client, limit: Duration) -> Result<ConnectionManager, RedisError> {
    let config = ConnectionManagerConfig::new()
        .set_max_delay(MAX_DELAY)
        .set_connection_timeout(Some(LIMIT))
        .set_response_timeout(Some(limit));
    ConnectionManager::new_lazy_with_config(client.clone(), config)
}
