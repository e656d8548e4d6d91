//! The backend's address, and the certificate authorities trusted to sign its certificate.

use std::{sync::Arc, time::Duration};

#[cfg(feature = "tls")]
use redis::TlsCertificates;
use redis::{
    Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsMode,
    io::tcp::TcpSettings,
    sentinel::{SentinelClientBuilder, SentinelServerType},
};

use super::source::{Sentinels, Source};
use crate::directory::DirectoryError;

/// How long sent data may go unacknowledged before the connection is considered dead.
///
/// Used only on Linux. Without it, after a network outage, TCP may wait for about as long as the outage lasted before it retransmits.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(2);

/// The address of a Redis or Valkey server, as configured by the application.
#[derive(Clone, Default)]
pub(crate) struct RedisAddress {
    pub(crate) url: String,
    /// The Sentinels' URLs. If there are any, the host of `url` is the primary's name.
    pub(crate) sentinels: Vec<String>,
    /// The only certificate authorities to trust, as PEM. If `None`, the system's authorities are trusted.
    #[cfg(feature = "tls")]
    pub(crate) root_certificate: Option<Vec<u8>>,
}

// === impl RedisAddress ===

impl RedisAddress {
    pub(crate) fn new(url: String) -> Self {
        Self {
            url,
            ..Self::default()
        }
    }

    /// Returns the source of connections to this address.
    ///
    /// # Errors
    ///
    /// Returns an error if:
    ///
    /// - a URL cannot be parsed, disables certificate verification, or needs a disabled feature
    /// - there are Sentinels but `url` does not contain the primary's name
    /// - the root certificate cannot be used
    pub(super) fn source(&self) -> Result<Source, DirectoryError> {
        let primary = self.parse(&self.url)?;
        self.check_trust(&primary)?;
        if self.sentinels.is_empty() {
            return Ok(Source::Fixed(Client::open(primary)?.into()));
        }
        Ok(Source::Sentinels(self.sentinels(&primary)?))
    }

    fn sentinels(&self, primary: &ConnectionInfo) -> Result<Arc<Sentinels>, DirectoryError> {
        let (name, tls) = match primary.addr() {
            ConnectionAddr::Tcp(name, _) => (name, None),
            ConnectionAddr::TcpTls { host, .. } => (host, Some(TlsMode::Secure)),
            _ => return Err(DirectoryError::unusable(NO_NAME)),
        };
        let sentinels = self.sentinels.iter().map(|url| self.parse(url));
        let sentinels: Vec<_> = sentinels.collect::<Result<_, _>>()?;
        let addresses = sentinels.iter().map(|sentinel| sentinel.addr().clone());
        let mut builder = SentinelClientBuilder::new(addresses, name, SentinelServerType::Master)?
            .set_client_to_sentinel_tcp_settings(primary.tcp_settings().clone())
            .set_client_to_redis_tcp_settings(primary.tcp_settings().clone())
            .set_client_to_redis_db(primary.redis_settings().db())
            .set_client_to_redis_protocol(primary.redis_settings().protocol());
        if let Some(user) = primary.redis_settings().username() {
            builder = builder.set_client_to_redis_username(user);
        }
        if let Some(password) = primary.redis_settings().password() {
            builder = builder.set_client_to_redis_password(password);
        }
        // The client takes only one set of credentials, which it uses for all Sentinels.
        if let Some(first) = sentinels.first() {
            if let Some(user) = first.redis_settings().username() {
                builder = builder.set_client_to_sentinel_username(user);
            }
            if let Some(password) = first.redis_settings().password() {
                builder = builder.set_client_to_sentinel_password(password);
            }
        }
        if let Some(tls) = tls {
            builder = builder.set_client_to_redis_tls_mode(tls);
            #[cfg(feature = "tls")]
            if let Some(certificates) = self.certificates() {
                builder = builder.set_client_to_redis_certificates(certificates);
            }
        }
        Ok(Sentinels::new(name, builder.build()?))
    }

    fn parse(&self, url: &str) -> Result<ConnectionInfo, DirectoryError> {
        let is_tls = ["rediss:", "valkeys:"]
            .iter()
            .any(|scheme| url.starts_with(scheme));
        if is_tls && cfg!(not(feature = "tls")) {
            return Err(DirectoryError::unusable(NEEDS_TLS));
        }
        let tcp = TcpSettings::default().set_nodelay(true);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(UNACKNOWLEDGED_TIMEOUT);
        let info = url.into_connection_info()?.set_tcp_settings(tcp);
        match info.addr() {
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                Err(DirectoryError::unusable(ALWAYS_VERIFIED))
            }
            ConnectionAddr::TcpTls { .. } => self.with_trust(info),
            _ => Ok(info),
        }
    }

    #[cfg(not(feature = "tls"))]
    #[allow(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "with TLS both are needed"
    )]
    fn with_trust(&self, info: ConnectionInfo) -> Result<ConnectionInfo, DirectoryError> {
        Ok(info)
    }

    #[cfg(feature = "tls")]
    fn with_trust(&self, info: ConnectionInfo) -> Result<ConnectionInfo, DirectoryError> {
        install_default_provider();
        let Some(certificates) = self.certificates() else {
            return Ok(info);
        };
        let client = Client::build_with_tls(info, certificates)?;
        Ok(client.get_connection_info().clone())
    }

    #[cfg(not(feature = "tls"))]
    #[allow(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "with TLS both are needed"
    )]
    fn check_trust(&self, _primary: &ConnectionInfo) -> Result<(), DirectoryError> {
        Ok(())
    }

    /// Returns an error if a root certificate is set but cannot be used.
    ///
    /// It cannot be used if it is not valid PEM, or if the connection does not use TLS.
    #[cfg(feature = "tls")]
    fn check_trust(&self, primary: &ConnectionInfo) -> Result<(), DirectoryError> {
        use rustls::pki_types::{CertificateDer, pem::PemObject as _};

        let Some(pem) = &self.root_certificate else {
            return Ok(());
        };
        if !matches!(primary.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(DirectoryError::unusable(CERTIFICATE_WITHOUT_TLS));
        }
        // The redis crate does not report an invalid certificate. It just doesn't trust any connection.
        let mut certificates = CertificateDer::pem_slice_iter(pem);
        let first = certificates.next();
        first
            .is_some_and(|first| first.is_ok())
            .then_some(())
            .ok_or_else(|| DirectoryError::unusable(NO_CERTIFICATE))
    }

    #[cfg(feature = "tls")]
    fn certificates(&self) -> Option<TlsCertificates> {
        let root_cert = Some(self.root_certificate.clone()?);
        Some(TlsCertificates {
            client_tls: None,
            root_cert,
        })
    }
}

const NEEDS_TLS: &str =
    "a rediss:// URL needs mcp-cancel-cluster's `tls` feature, which is not enabled";
const ALWAYS_VERIFIED: &str = "the directory's certificate is always verified, so its URL must not end with #insecure: set the certificate authority with `tls_root_certificate`";
const NO_NAME: &str = "with Sentinels, the host in the directory's URL must be the primary's name, for example redis://name";
#[cfg(feature = "tls")]
const CERTIFICATE_WITHOUT_TLS: &str =
    "a root certificate was given, but the directory's URL does not use TLS (rediss://)";
#[cfg(feature = "tls")]
const NO_CERTIFICATE: &str = "the directory's root certificate is not a PEM certificate";

/// Installs ring as the default crypto provider, unless the program has installed another.
///
/// rustls panics if several providers are compiled in but none is installed.
#[cfg(feature = "tls")]
fn install_default_provider() {
    use rustls::crypto::{CryptoProvider, ring};

    if CryptoProvider::get_default().is_none() {
        // This fails harmlessly if another thread has installed a provider in the meantime.
        let _ = ring::default_provider().install_default();
    }
}
