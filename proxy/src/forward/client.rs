//! The connections to the server.

use std::{io, time::Duration};

use http::{
    Request,
    uri::{Authority, Scheme},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::{net::TcpStream, time::timeout};

use super::{
    replayable_body::ReplayableBody,
    small_reads::{CONNECT_TIMEOUT, SmallReads},
};

/// How long an unused connection is kept: 4 s.
///
/// Node and uvicorn close theirs after 5 s, and a request at the same moment is lost.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Idle time of a connection to the server before the kernel sends TCP keep-alives: 60 s.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);

/// An HTTP client for one scheme.
pub(super) enum Client {
    Plain(legacy::Client<SmallReads<HttpConnector>, ReplayableBody>),
    /// Created only for https, because its creation reads the certificates of this machine.
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

/// Opens a connection to a server, without TLS, and closes it.
pub(super) async fn connect(
    scheme: &Scheme,
    authority: &Authority,
    within: Duration,
) -> io::Result<()> {
    let host = authority.host().trim_matches(['[', ']']);
    let default = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    let port = authority.port_u16().unwrap_or(default);
    let _closed = timeout(within, TcpStream::connect((host, port))).await??;
    Ok(())
}
