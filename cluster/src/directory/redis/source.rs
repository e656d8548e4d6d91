//! The source of connections: a fixed address, or the primary reported by Sentinels.

use std::{collections::HashMap, sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, RedisError,
    aio::MultiplexedConnection, cmd, sentinel::SentinelClient,
};
use tokio::sync::Mutex;

use crate::directory::DIRECTORY_TIMEOUT;

/// Timeout for opening a connection. A command waiting for the connection still fails at its own timeout.
///
/// This allows for the four round trips of a TLS connection at 200 ms each.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A fixed address, or Sentinels that report the current primary's address.
#[derive(Clone)]
pub(super) enum Source {
    Fixed(Box<Client>),
    Sentinels(Arc<Sentinels>),
}

/// The Sentinels watching a primary.
pub(super) struct Sentinels {
    name: String,
    client: Mutex<SentinelClient>,
    /// A connection to the Sentinel that answered last.
    last_sentinel: Mutex<Option<MultiplexedConnection>>,
}

// === impl Source ===

impl Source {
    /// Returns a client for the fixed address, or for the primary the Sentinels now report.
    pub(super) async fn client(&self) -> Result<Client, RedisError> {
        match self {
            Self::Fixed(client) => Ok(Client::clone(client)),
            Self::Sentinels(sentinels) => sentinels.client.lock().await.async_get_client().await,
        }
    }

    /// Opens one connection, or returns the reason it could not be opened.
    pub(super) async fn connect_once(&self) -> Result<MultiplexedConnection, RedisError> {
        connect_once(&self.client().await?).await
    }
}

// === impl Sentinels ===

impl Sentinels {
    pub(super) fn new(name: &str, client: SentinelClient) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            client: Mutex::new(client),
            last_sentinel: Mutex::default(),
        })
    }

    /// Returns `true` if a Sentinel reports this client's address as the primary's.
    ///
    /// # Errors
    ///
    /// Returns an error if no Sentinel can be reached, or if the Sentinel asked does not answer, does not know the name, or reports no
    /// address.
    pub(super) async fn is_primary(&self, client: &Client) -> Result<bool, RedisError> {
        let mut last_sentinel = self.last_sentinel.lock().await;
        let mut connection = match last_sentinel.take() {
            Some(connection) => connection,
            None => {
                let sentinel = self.client.lock().await.async_get_sentinel_client().await;
                connect_once(&sentinel?).await?
            }
        };
        let mut command = cmd("SENTINEL");
        command.arg("MASTER").arg(&self.name);
        let primary: HashMap<String, String> = command.query_async(&mut connection).await?;
        // Store it only on success, so that after an error the next call picks a Sentinel again.
        *last_sentinel = Some(connection);
        let field = |name| primary.get(name).map(String::as_str);
        match (
            field("ip"),
            field("port"),
            client.get_connection_info().addr(),
        ) {
            (
                Some(ip),
                Some(port),
                ConnectionAddr::Tcp(client_host, client_port)
                | ConnectionAddr::TcpTls {
                    host: client_host,
                    port: client_port,
                    ..
                },
            ) => Ok(client_host == ip && client_port.to_string() == port),
            _ => Err((
                ErrorKind::UnexpectedReturnType,
                "the primary has no address",
            )
                .into()),
        }
    }
}

async fn connect_once(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(Some(DIRECTORY_TIMEOUT));
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
}
