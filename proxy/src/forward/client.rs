//! The HTTP client for the server and a check that the server can be reached.

use std::{io, net::SocketAddr, time::Duration};

use futures_util::future::select_ok;
use http::{
    Request,
    uri::{Authority, Scheme},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use super::{
    replayable_body::ReplayableBody,
    small_reads::{CONNECT_TIMEOUT, SmallReads},
};

/// How long an idle connection stays in the pool.
///
/// This must be shorter than the server's own limit, because a request sent just as the server closes the connection might be
/// lost. gunicorn closes idle connections after 2 s, Node and uvicorn after 5 s.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_millis(1_500);

/// How long a connection to the server may be idle before the kernel sends TCP keep-alives.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);

/// An HTTP client for one scheme.
pub(super) enum Client {
    Plain(legacy::Client<SmallReads<HttpConnector>, ReplayableBody>),
    /// Only created if needed, because creating it loads the system's root certificates.
    Tls(legacy::Client<SmallReads<HttpsConnector<HttpConnector>>, ReplayableBody>),
}

// === impl Client ===

impl Client {
    pub(super) fn new(is_tls: bool) -> io::Result<Self> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_keepalive(Some(TCP_KEEPALIVE));
        connector.enforce_http(!is_tls);
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        builder
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT);
        if !is_tls {
            return Ok(Self::Plain(builder.build(SmallReads(connector))));
        }
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()?
            .https_only()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self::Tls(builder.build(SmallReads(connector))))
    }

    pub(super) fn request(&self, request: Request<ReplayableBody>) -> legacy::ResponseFuture {
        match self {
            Self::Plain(client) => client.request(request),
            Self::Tls(client) => client.request(request),
        }
    }
}

/// Opens a TCP connection to a server, without TLS, and closes it again. Fails after `limit`.
pub(super) async fn connect(
    scheme: &Scheme,
    authority: &Authority,
    limit: Duration,
) -> io::Result<()> {
    let host = authority.host().trim_matches(['[', ']']);
    let default = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    let port = authority.port_u16().unwrap_or(default);
    let connecting = async { connect_to_any(lookup_host((host, port)).await?).await };
    timeout(limit, connecting).await?
}

/// Connects to all addresses concurrently, and succeeds once one connection is established.
///
/// That connection is closed again. An unresponsive address must not fail this check, because the HTTP client copes with
/// unresponsive addresses: it starts with one address family and tries the other shortly after (RFC 8305).
async fn connect_to_any(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<()> {
    let attempts: Vec<_> = addresses
        .map(|address| Box::pin(TcpStream::connect(address)))
        .collect();
    if attempts.is_empty() {
        return Err(io::Error::other("the host name has no addresses"));
    }
    let (_closed, _others) = select_ok(attempts).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// A listener whose accept queue is full stands in for an unresponsive address.
    ///
    /// The kernel drops connection attempts to such a listener.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn an_unresponsive_address_does_not_hide_another() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let silent = socket.listen(0).unwrap();
        let silent_address = silent.local_addr().unwrap();
        let mut queued = Vec::new();
        while let Ok(connected) = timeout(
            Duration::from_millis(200),
            TcpStream::connect(silent_address),
        )
        .await
        {
            queued.push(connected.unwrap());
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [silent_address, listener.local_addr().unwrap()];
        let connected = timeout(
            Duration::from_secs(5),
            connect_to_any(addresses.into_iter()),
        );
        assert!(connected.await.is_ok_and(|connected| connected.is_ok()));
        assert!(connect_to_any(std::iter::empty()).await.is_err());
    }
}
