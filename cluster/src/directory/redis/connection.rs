//! The connections to the backend, which are reestablished when they break.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use redis::{
    Client, RedisError,
    aio::{ConnectionManager, ConnectionManagerConfig},
};
use tokio::{task::JoinHandle, time::sleep};

use super::source::{CONNECT_TIMEOUT, Sentinels, Source};
use crate::{
    directory::{ANSWERS_TIMEOUT, DIRECTORY_TIMEOUT},
    lock::lock,
};

/// Maximum delay between connection attempts. The default of up to 5 s is too long.
const MAX_DELAY: Duration = Duration::from_millis(500);

/// Maximum number of consecutive retries when connecting to a fixed address.
const MAX_RETRIES: usize = 6;

/// How often a Sentinel is asked for the primary.
///
/// After an orderly failover the old primary keeps answering for up to 10 s, but on the new primary the lease lapses after 6 s.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Two connections to the backend: one for answers to calls, and one for everything else.
///
/// This keeps megabytes of answers from delaying heartbeats.
pub(super) struct Connections {
    shared: Arc<SharedConnections>,
    /// Keeps the connections on the current primary, if there are Sentinels.
    watch_task: Option<JoinHandle<()>>,
}

/// The part of [`Connections`] that the watch task shares.
struct SharedConnections {
    source: Source,
    current: Mutex<Current>,
}

/// The current connections, which may still be being established.
struct Current {
    connecting: Connecting,
    /// Whether a heartbeat has been started on these connections and none has been answered since.
    is_unanswered: bool,
}

/// Resolves to the connections once they are established. All commands share this future.
type Connecting = Shared<BoxFuture<'static, Result<Pair, RedisError>>>;

/// The two connections, with the client that opened them.
#[derive(Clone)]
struct Pair {
    client: Client,
    general: ConnectionManager,
    answers: ConnectionManager,
}

// === impl Connections ===

impl Connections {
    /// Creates connections, to be established by the first command.
    pub(super) fn new(source: Source) -> Self {
        let shared = Arc::new(SharedConnections {
            current: Mutex::new(Current::new(&source)),
            source: source.clone(),
        });
        let watch_task = match source {
            Source::Fixed(_) => None,
            Source::Sentinels(sentinels) => Some(tokio::spawn(shared.clone().watch(sentinels))),
        };
        Self { shared, watch_task }
    }

    pub(super) fn source(&self) -> &Source {
        &self.shared.source
    }

    pub(super) async fn get(&self) -> Result<ConnectionManager, RedisError> {
        Ok(self.shared.pair().await?.general)
    }

    pub(super) async fn for_answers(&self) -> Result<ConnectionManager, RedisError> {
        Ok(self.shared.pair().await?.answers)
    }

    /// Makes later commands use new connections, unless new ones are already being established.
    pub(super) fn renew(&self) {
        self.shared.renew();
    }

    /// Called when a heartbeat starts, to replace unusable connections.
    ///
    /// A connection to a fixed address is reestablished automatically. Behind Sentinels the primary may have changed, so if a heartbeat on
    /// established connections was never answered, for whatever reason, the Sentinels are asked for the primary again.
    pub(super) fn on_heartbeat_started(&self) {
        let mut current = self.shared.current();
        let is_unusable = match (current.connecting.peek(), &self.shared.source) {
            (None, _) | (Some(Ok(_)), Source::Fixed(_)) => false,
            (Some(Err(_)), _) => true,
            (Some(Ok(_)), Source::Sentinels(_)) => mem::replace(&mut current.is_unanswered, true),
        };
        if is_unusable {
            *current = Current::new(&self.shared.source);
        }
    }

    pub(super) fn on_heartbeat_answered(&self) {
        self.shared.current().is_unanswered = false;
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        if let Some(watch_task) = &self.watch_task {
            watch_task.abort();
        }
    }
}

// === impl SharedConnections ===

impl SharedConnections {
    async fn pair(&self) -> Result<Pair, RedisError> {
        let connecting = self.current().connecting.clone();
        connecting.await
    }

    fn renew(&self) {
        let mut current = self.current();
        if current.connecting.peek().is_some() {
            *current = Current::new(&self.source);
        }
    }

    /// Replaces connections to an old primary, even if it still answers. Checks every [`WATCH_INTERVAL`], forever.
    async fn watch(self: Arc<Self>, sentinels: Arc<Sentinels>) {
        loop {
            sleep(WATCH_INTERVAL).await;
            let Ok(pair) = self.pair().await else {
                continue;
            };
            let Ok(false) = sentinels.is_primary(&pair.client).await else {
                continue;
            };
            // That Sentinel may be lagging behind the others, so ask again for the primary.
            let Ok(primary) = self.source.client().await else {
                continue;
            };
            if primary.get_connection_info().addr() != pair.client.get_connection_info().addr() {
                self.renew();
                // Connect now, so that the next heartbeat already uses the new connections. If this fails, the heartbeat reports the error.
                let _ = self.pair().await;
            }
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        lock(&self.current)
    }
}

// === impl Current ===

impl Current {
    fn new(source: &Source) -> Self {
        Self {
            connecting: connect(source.clone()).boxed().shared(),
            is_unanswered: false,
        }
    }
}

async fn connect(source: Source) -> Result<Pair, RedisError> {
    let client = source.client().await?;
    let retries = match &source {
        Source::Fixed(_) => MAX_RETRIES,
        // If the primary does not answer, the Sentinels are asked for its address again.
        Source::Sentinels(_) => 0,
    };
    let config = |limit| {
        ConnectionManagerConfig::new()
            .set_max_delay(MAX_DELAY)
            .set_number_of_retries(retries)
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(limit))
    };
    let general = match &source {
        // The first command establishes the connection, and retries automatically.
        Source::Fixed(_) => {
            ConnectionManager::new_lazy_with_config(client.clone(), config(DIRECTORY_TIMEOUT))
        }
        Source::Sentinels(_) => {
            ConnectionManager::new_with_config(client.clone(), config(DIRECTORY_TIMEOUT)).await
        }
    }?;
    let answers = ConnectionManager::new_lazy_with_config(client.clone(), config(ANSWERS_TIMEOUT))?;
    Ok(Pair {
        client,
        general,
        answers,
    })
}
