//! The connections to the engine, which are made again when they break, and where the engine is.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use redis::{
    AsyncConnectionConfig, Client, RedisError,
    aio::{ConnectionManager, ConnectionManagerConfig, MultiplexedConnection},
    sentinel::SentinelClient,
};

use crate::directory::{ANSWERS_LIMIT, LIMIT};

/// How long the engine is tried again after at most, when it is away: 500 ms. By default it would be seen 5 s late.
const MAX_DELAY: Duration = Duration::from_millis(500);

/// How often a connection to a known address is tried in a row.
const MAX_RETRIES: usize = 6;

/// Timeout of a new connection: 1 s. Chosen because TLS takes four round trips, to an engine that is 200 ms away. Commands do not wait
/// longer than their own limit.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// Where connections begin.
#[derive(Clone)]
pub(super) enum Source {
    Fixed(Client),
    /// The address of the primary is asked for, each time anew.
    Sentinel(Arc<tokio::sync::Mutex<SentinelClient>>),
}

/// Two connections to the engine: one for answers of calls, so that megabytes of them delay no heartbeat, and one for all else.
pub(super) struct Connections {
    source: Source,
    current: Mutex<Current>,
}

/// The connections of now.
struct Current {
    connecting: Connecting,
    /// A heartbeat began on these connections, and none was answered since.
    is_unanswered: bool,
}

/// Connections that exist, or are about to. All who need them wait for the same ones.
type Connecting = Shared<BoxFuture<'static, Result<Pair, RedisError>>>;

#[derive(Clone)]
struct Pair {
    all_else: ConnectionManager,
    answers: ConnectionManager,
}

// === impl Source ===

impl Source {
    pub(super) fn sentinel(sentinel: SentinelClient) -> Self {
        Self::Sentinel(Arc::new(tokio::sync::Mutex::new(sentinel)))
    }

    /// Returns one connection, or the reason why there is none.
    pub(super) async fn connect_once(&self) -> Result<MultiplexedConnection, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_LIMIT))
            .set_response_timeout(Some(LIMIT));
        let client = self.client().await?;
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }

    async fn client(&self) -> Result<Client, RedisError> {
        match self {
            Self::Fixed(client) => Ok(client.clone()),
            Self::Sentinel(sentinel) => sentinel.lock().await.async_get_client().await,
        }
    }

    async fn connect(self) -> Result<Pair, RedisError> {
        let client = self.client().await?;
        let (config, answers) = (self.config(LIMIT), self.config(ANSWERS_LIMIT));
        let answers = ConnectionManager::new_lazy_with_config(client.clone(), answers)?;
        let all_else = match self {
            // It may take as long as it takes: the first command begins it.
            Self::Fixed(_) => ConnectionManager::new_lazy_with_config(client, config),
            // If this fails, the address is asked for again.
            Self::Sentinel(_) => ConnectionManager::new_with_config(client, config).await,
        }?;
        Ok(Pair { all_else, answers })
    }

    fn config(&self, limit: Duration) -> ConnectionManagerConfig {
        let retries = match self {
            Self::Fixed(_) => MAX_RETRIES,
            Self::Sentinel(_) => 0,
        };
        ConnectionManagerConfig::new()
            .set_max_delay(MAX_DELAY)
            .set_number_of_retries(retries)
            .set_connection_timeout(Some(CONNECT_LIMIT))
            .set_response_timeout(Some(limit))
    }
}

// === impl Connections ===

impl Connections {
    /// Connections that begin with the first command.
    pub(super) fn new(source: Source) -> Self {
        let current = Mutex::new(Current::new(&source));
        Self { source, current }
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    pub(super) async fn get(&self) -> Result<ConnectionManager, RedisError> {
        Ok(self.pair().await?.all_else)
    }

    pub(super) async fn for_answers(&self) -> Result<ConnectionManager, RedisError> {
        Ok(self.pair().await?.answers)
    }

    /// Has the next commands begin new connections, unless that is already so.
    pub(super) fn renew(&self) {
        let mut current = self.current();
        if current.connecting.peek().is_some() {
            *current = Current::new(&self.source);
        }
    }

    /// A heartbeat begins. If the connections cannot be used, new ones are begun.
    ///
    /// A connection to a fixed address is made again by itself. Behind Sentinels the primary may be another one by now: it is asked for
    /// when a heartbeat that had connections was not answered, for whatever reason.
    pub(super) fn heartbeat_begins(&self) {
        let mut current = self.current();
        let is_unusable = match (current.connecting.peek(), &self.source) {
            (None, _) => false,
            (Some(Err(_)), _) => true,
            (Some(Ok(_)), Source::Fixed(_)) => false,
            (Some(Ok(_)), Source::Sentinel(_)) => mem::replace(&mut current.is_unanswered, true),
        };
        if is_unusable {
            *current = Current::new(&self.source);
        }
    }

    pub(super) fn heartbeat_answered(&self) {
        self.current().is_unanswered = false;
    }

    async fn pair(&self) -> Result<Pair, RedisError> {
        let connecting = self.current().connecting.clone();
        connecting.await
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Current ===

impl Current {
    fn new(source: &Source) -> Self {
        Self {
            connecting: source.clone().connect().boxed().shared(),
            is_unanswered: false,
        }
    }
}
