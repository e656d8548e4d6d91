//! The builder for a [`Cluster`].

use std::{
    error::Error,
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::{
    cluster::{Cluster, Options, join},
    directory::{DirectoryError, MemoryDirectory, RedisAddress, RedisDirectory},
    ids::{Incarnation, Owner},
    relay::{
        filter::PeersFilter,
        wire::{InvalidSecret, Secret},
    },
};

/// Configures an instance before it joins a cluster. Created by [`Cluster::redis`] or [`Cluster::in_memory`].
#[derive(Clone)]
#[must_use = "nothing happens until `connect` is called"]
pub struct ClusterBuilder {
    backend: Backend,
    advertised: Option<String>,
    secret: Option<String>,
    also_accepted: Option<String>,
    options: Options,
    filter: PeersFilter,
}

/// Where the directory is.
#[derive(Clone)]
enum Backend {
    Memory(MemoryDirectory),
    Redis(RedisAddress),
}

/// The error returned when an instance cannot join a cluster.
#[derive(Debug)]
pub struct ConnectError {
    kind: ConnectErrorKind,
}

#[derive(Debug)]
enum ConnectErrorKind {
    Backend(DirectoryError),
    NotAdvertised,
    NotAnAddress(String),
    NotAdmitted(IpAddr),
    Secret,
}

// === impl Cluster ===

impl Cluster {
    /// Returns the builder for a cluster with a Redis or Valkey directory.
    ///
    /// Use the same `url` on all instances, for example `redis://cache:6379`. `rediss://` enables TLS, and requires the `tls` feature. With
    /// Sentinels, the host is the name of the primary (see [`sentinels`](ClusterBuilder::sentinels)).
    pub fn redis(url: impl Into<String>) -> ClusterBuilder {
        ClusterBuilder::new(Backend::Redis(RedisAddress::new(url.into())))
    }

    /// Returns the builder for a cluster whose instances are all in this process.
    pub fn in_memory(directory: &MemoryDirectory) -> ClusterBuilder {
        ClusterBuilder::new(Backend::Memory(directory.clone()))
    }
}

// === impl ClusterBuilder ===

impl fmt::Debug for ClusterBuilder {
    /// Omits the secrets, and the directory's URLs, which may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterBuilder")
            .field("advertised", &self.advertised)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl ClusterBuilder {
    fn new(backend: Backend) -> Self {
        Self {
            backend,
            advertised: None,
            secret: None,
            also_accepted: None,
            options: Options::default(),
            filter: PeersFilter::default(),
        }
    }

    /// Sets the Sentinels that monitor the directory's primary.
    ///
    /// Each URL looks like `redis://sentinel-1:26379`. The host in the directory's own URL becomes the name of the primary, and the port is
    /// ignored. The user and password for the primary are taken from the directory's URL. All Sentinels get the user and password in the
    /// first Sentinel's URL. When a heartbeat is refused or goes unanswered, the instance asks the Sentinels for the primary. It also
    /// checks with one of the Sentinels every second that the primary has not changed.
    ///
    /// This has no effect on an in-memory directory.
    ///
    /// ```no_run
    /// use mcp_cancel_cluster::Cluster;
    ///
    /// # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
    /// let cluster = Cluster::redis("redis://:password@directory")
    ///     .sentinels(["redis://10.0.0.1:26379", "redis://10.0.0.2:26379", "redis://10.0.0.3:26379"])
    ///     .advertise("10.0.0.7:9000")
    ///     .connect()
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sentinels(mut self, urls: impl IntoIterator<Item = impl Into<String>>) -> Self {
        if let Backend::Redis(address) = &mut self.backend {
            address.sentinels = urls.into_iter().map(Into::into).collect();
        }
        self
    }

    /// Sets the certificate authorities (PEM) that may sign the directory's certificate.
    ///
    /// By default, the system's certificate authorities are trusted. The setting applies to `rediss://` URLs, including those of Sentinels.
    /// The certificate must be valid for the host in the URL or, with Sentinels, for the primary's address as reported by the Sentinels.
    ///
    /// This has no effect on an in-memory directory.
    ///
    /// ```no_run
    /// use mcp_cancel_cluster::Cluster;
    ///
    /// # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
    /// let cluster = Cluster::redis("rediss://cache.internal:6380")
    ///     .tls_root_certificate(std::fs::read("/etc/ssl/private-ca.pem")?)
    ///     .advertise("10.0.0.7:9000")
    ///     .connect()
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls")]
    pub fn tls_root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        if let Backend::Redis(address) = &mut self.backend {
            address.root_certificate = Some(pem.into());
        }
        self
    }

    /// Sets the IP address and port at which other instances reach the peer listener.
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertised = Some(address.into());
        self
    }

    /// Sets the secret shared by all instances.
    ///
    /// Without a secret, any client whose address [`peers_filter`](Self::peers_filter) admits can pose as a peer. The secret is sent
    /// unencrypted, just like the relayed requests. To change it, use rolling restarts with [`also_accept`](Self::also_accept).
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// Accepts a second secret from peers. This instance still sends only [`secret`](Self::secret).
    ///
    /// Changing a secret takes three rolling restarts, so that at any time every instance accepts what every other instance sends:
    ///
    /// | restart | `secret` | `also_accept` |
    /// |---|---|---|
    /// | before | old | |
    /// | first | old | new |
    /// | second | new | old |
    /// | third | new | |
    ///
    /// You cannot introduce a first secret this way: until all instances have it, some relayed requests are refused, and their clients get
    /// a 503.
    ///
    /// ```
    /// # use tokio::{io::{AsyncReadExt, AsyncWriteExt}, net::{TcpListener, TcpStream}};
    /// use mcp_cancel_cluster::{Cluster, ClusterBuilder, MemoryDirectory};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # async fn accepts(member: ClusterBuilder, secret: &str) -> Result<bool, Box<dyn std::error::Error>> {
    /// #     let listener = TcpListener::bind("127.0.0.1:0").await?;
    /// #     let address = listener.local_addr()?;
    /// #     let cluster = member.advertise(address.to_string()).connect().await?;
    /// #     let app: axum::Router = axum::Router::new().layer(cluster.layer());
    /// #     let served = async { cluster.serve_peers(listener, app).await };
    /// #     let is_accepted = async {
    /// #         let mut stream = TcpStream::connect(address).await?;
    /// #         let request = format!("GET / HTTP/1.1\r\nhost: a\r\nmcp-cluster: {secret}\r\n\r\n");
    /// #         stream.write_all(request.as_bytes()).await?;
    /// #         let mut answer = String::new();
    /// #         stream.read_to_string(&mut answer).await?;
    /// #         Ok(!answer.starts_with("HTTP/1.1 403 "))
    /// #     };
    /// #     tokio::select! {
    /// #         accepted = is_accepted => accepted,
    /// #         () = served => Ok(false),
    /// #     }
    /// # }
    /// let directory = MemoryDirectory::default();
    /// let before = Cluster::in_memory(&directory).secret("old");
    /// let first = before.clone().also_accept("new");
    /// let second = Cluster::in_memory(&directory).secret("new").also_accept("old");
    /// let third = Cluster::in_memory(&directory).secret("new");
    ///
    /// // During the second restart, some instances send the old secret and some the new one.
    /// for member in [first.clone(), second.clone()] {
    ///     assert!(accepts(member.clone(), "old").await? && accepts(member, "new").await?);
    /// }
    /// // Without the first restart, instances not yet restarted would refuse the others.
    /// assert!(!accepts(before, "new").await?);
    /// // After the third restart, the old secret is refused.
    /// assert!(accepts(third.clone(), "new").await? && !accepts(third, "old").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn also_accept(mut self, secret: impl Into<String>) -> Self {
        self.also_accepted = Some(secret.into());
        self
    }

    /// Sets which addresses peers may connect from and advertise.
    ///
    /// By default, private addresses (RFC 1918, RFC 4193) and loopback addresses are admitted.
    pub fn peers_filter(mut self, admits: impl Fn(IpAddr) -> bool + Send + Sync + 'static) -> Self {
        self.filter = PeersFilter::new(admits);
        self
    }

    /// Sets the longest time a client may wait before retrying after a 503.
    ///
    /// As long as any instance has turned a client away within that time, no instance cancels an orphaned call, because the call might
    /// belong to that client. The default is 40 s, which is longer than the official SDKs wait. A call whose grace period is even longer
    /// waits for that long instead, because after a 503 a client may also wait for the server's `retry` delay.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    ///
    /// let builder = Cluster::in_memory(&MemoryDirectory::default()).client_backoff(Duration::from_secs(5));
    /// assert!(format!("{builder:?}").contains("client_backoff: 5s"));
    /// ```
    pub fn client_backoff(mut self, longest: Duration) -> Self {
        self.options.client_backoff = longest;
        self
    }

    /// Refuses requests for this instance's sessions while its lease may have lapsed.
    ///
    /// The lease may have lapsed once the directory has not responded for 5.5 s. By default, these requests are still served. However,
    /// another instance that can reach the directory may claim one of the sessions in the meantime, in which case both instances serve it
    /// until the directory responds again. With this option, the requests get a 503 with `Retry-After` instead. Calls already in flight
    /// keep running.
    ///
    /// ```
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    ///
    /// let builder = Cluster::in_memory(&MemoryDirectory::default()).require_lease();
    /// assert!(format!("{builder:?}").contains("requires_lease: true"));
    /// ```
    pub fn require_lease(mut self) -> Self {
        self.options.requires_lease = true;
        self
    }

    /// Joins the cluster.
    ///
    /// The directory does not have to be reachable yet. Until it is, no session can be opened, and requests for other instances' sessions
    /// get a 503.
    ///
    /// # Errors
    ///
    /// - A directory URL cannot be used, for example because it requires a disabled feature.
    /// - The root certificate is not PEM, or is set even though the directory's URL does not use TLS.
    /// - The directory is reachable but is a Redis Cluster.
    /// - The advertised address is missing or invalid, or [`peers_filter`](Self::peers_filter) does not admit it.
    /// - A secret is empty, has leading or trailing whitespace, or contains characters not allowed in a header field.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    ///
    /// let directory = MemoryDirectory::default();
    /// let unspecified = Cluster::in_memory(&directory).advertise("0.0.0.0:9000").connect().await;
    /// assert!(unspecified.unwrap_err().to_string().contains("0.0.0.0:9000"));
    /// let public = Cluster::in_memory(&directory).advertise("203.0.113.7:9000");
    /// assert!(public.clone().connect().await.is_err(), "not an address of a private network");
    /// let member = public.peers_filter(|_| true).secret("of all instances").connect().await;
    /// assert!(member.is_ok());
    /// # }
    /// ```
    pub async fn connect(self) -> Result<Cluster, ConnectError> {
        let this_instance = Owner {
            address: self.parse_address()?,
            incarnation: Incarnation::random(),
        };
        let secret = self.parse_secret().map_err(|_| ConnectErrorKind::Secret)?;
        let options = self.options;
        match self.backend {
            Backend::Memory(directory) => {
                Ok(join(this_instance, directory, self.filter, secret, options))
            }
            Backend::Redis(address) => {
                let directory = RedisDirectory::new(&address).map_err(ConnectErrorKind::Backend)?;
                directory
                    .inspect()
                    .await
                    .map_err(ConnectErrorKind::Backend)?;
                Ok(join(this_instance, directory, self.filter, secret, options))
            }
        }
    }

    fn parse_secret(&self) -> Result<Secret, InvalidSecret> {
        let secret = match &self.secret {
            Some(secret) => Secret::new(secret)?,
            None => Secret::default(),
        };
        match &self.also_accepted {
            Some(other) => secret.also_accept(other),
            None => Ok(secret),
        }
    }

    fn parse_address(&self) -> Result<SocketAddr, ConnectErrorKind> {
        let text = self
            .advertised
            .as_deref()
            .ok_or(ConnectErrorKind::NotAdvertised)?;
        let address: SocketAddr = text
            .parse()
            .map_err(|_| ConnectErrorKind::NotAnAddress(text.to_owned()))?;
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(ConnectErrorKind::NotAnAddress(text.to_owned()));
        }
        // The other instances have the same filter, so they would never connect to this address.
        if !self.filter.admits(address.ip()) {
            return Err(ConnectErrorKind::NotAdmitted(address.ip()));
        }
        Ok(address)
    }
}

// === impl ConnectError ===

impl From<ConnectErrorKind> for ConnectError {
    fn from(kind: ConnectErrorKind) -> Self {
        Self { kind }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ConnectErrorKind::Backend(error) => write!(f, "cannot use the directory: {error}"),
            ConnectErrorKind::NotAdvertised => {
                f.write_str("no address to advertise to the other instances")
            }
            ConnectErrorKind::NotAnAddress(text) => {
                write!(
                    f,
                    "{text:?} is not an address that other instances can reach (expected an IP address and port, such as 10.0.0.7:9000)"
                )
            }
            ConnectErrorKind::NotAdmitted(ip) => write!(
                f,
                "`peers_filter` rejects the advertised address {ip}"
            ),
            ConnectErrorKind::Secret => {
                f.write_str("a secret is empty, has leading or trailing whitespace, or contains characters not allowed in a header field")
            }
        }
    }
}

impl Error for ConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.kind {
            ConnectErrorKind::Backend(error) => error.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn connect_error(builder: ClusterBuilder) -> String {
        builder.connect().await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn connect_refuses_an_address_that_peers_cannot_reach() {
        let directory = MemoryDirectory::default();
        let builder = || Cluster::in_memory(&directory);
        assert!(connect_error(builder()).await.contains("no address"));
        for address in [
            "",
            "peer:9000",
            "10.0.0.7",
            "10.0.0.7:0",
            "0.0.0.0:9000",
            "[::]:9000",
        ] {
            let error = connect_error(builder().advertise(address)).await;
            assert!(error.starts_with(&format!("{address:?} is not")), "{error}");
        }
        let error = connect_error(builder().advertise("8.8.8.8:9000")).await;
        assert!(error.contains("rejects the advertised address"), "{error}");
        let open = builder().advertise("8.8.8.8:9000").peers_filter(|_| true);
        assert!(open.connect().await.is_ok());
    }

    #[tokio::test]
    async fn connect_refuses_an_invalid_secret_or_url() {
        let memory = Cluster::in_memory(&MemoryDirectory::default()).advertise("10.0.0.7:9000");
        assert!(
            connect_error(memory.clone().secret(""))
                .await
                .contains("secret")
        );
        assert!(
            connect_error(memory.clone().also_accept(""))
                .await
                .contains("secret")
        );
        assert!(memory.clone().secret("a secret").connect().await.is_ok());
        let redis = Cluster::redis("not a url").advertise("10.0.0.7:9000");
        assert!(connect_error(redis).await.contains("directory"));
        let debug = format!("{:?}", memory.secret("a secret"));
        assert!(!debug.contains("a secret"), "{debug}");
    }
}
