//! A listener that accepts watched connections.

use std::{io, net::SocketAddr, time::Duration};

use tokio::net::TcpListener;
use tracing::error;

use super::stream::WatchedStream;

/// How long to wait after an accept error that is not specific to one connection.
///
/// Retrying immediately would spin, for example while too many files are open.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// A listener whose connections have a [`Peer`](super::Peer) that can be watched.
///
/// On Linux and Android, the `Peer` detects a disconnect even while hyper is not reading, because it has buffered the next
/// request or because the handler is not reading the request body. With a plain `TcpListener`, this kind of disconnect is
/// detected only once a write fails, and never if nothing is written.
///
/// In your accept loop, put each stream's peer into the extensions of its requests:
///
/// ```
/// use http::{Request, Response};
/// use hyper::body::Incoming;
/// use hyper_util::{rt::{TokioExecutor, TokioIo}, server::conn::auto, service::TowerToHyperService};
/// use tower::{ServiceExt, service_fn};
/// use watched_socket::{Peer, WatchedListener};
///
/// async fn serve(listener: WatchedListener) {
///     let app = service_fn(async |request: Request<Incoming>| {
///         let peer = Peer::of(request.extensions()).map(Peer::addr);
///         Ok::<_, std::convert::Infallible>(Response::new(format!("hello {peer:?}")))
///     });
///     loop {
///         let (stream, _) = listener.accept().await;
///         let peer = stream.peer();
///         let service = app.clone().map_request(move |mut request: Request<Incoming>| {
///             request.extensions_mut().insert(peer.clone());
///             request
///         });
///         tokio::spawn(async move {
///             let builder = auto::Builder::new(TokioExecutor::new());
///             let service = TowerToHyperService::new(service);
///             let _ = builder.serve_connection(TokioIo::new(stream), service).await;
///         });
///     }
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let listener = WatchedListener::new(tokio::net::TcpListener::bind("127.0.0.1:0").await?);
/// # let addr = listener.local_addr()?;
/// # tokio::spawn(serve(listener));
/// # use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # let mut client = tokio::net::TcpStream::connect(addr).await?;
/// # client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await?;
/// # let mut answer = String::new();
/// # client.read_to_string(&mut answer).await?;
/// # assert!(answer.contains("hello Some(127.0.0.1:"), "{answer}");
/// # Ok(())
/// # }
/// ```
///
/// With the `axum` feature, you can pass the listener to `axum::serve`:
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{Router, serve::ListenerExt};
/// use watched_socket::{DeadPeer, Peer, WatchedListener};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// DeadPeer::new().apply(&listener)?;
/// let listener = WatchedListener::new(listener).tap_io(|stream| {
///     let _ = stream.tcp().set_nodelay(true);
/// });
/// let app: Router = Router::new();
/// let server = axum::serve(listener, app.into_make_service_with_connect_info::<Peer>());
/// assert!(server.local_addr()?.port() > 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WatchedListener {
    listener: TcpListener,
}

// === impl WatchedListener ===

impl WatchedListener {
    /// Wraps a listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener }
    }

    /// Waits for the next connection, and returns it along with the client's address.
    ///
    /// Errors are handled as in `axum::serve`: those specific to one connection are ignored. Any other error, such as too many
    /// open files, is logged, and the listener retries one second later.
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when this future is dropped.
    pub async fn accept(&self) -> (WatchedStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, addr)) => return (WatchedStream::new(stream, addr), addr),
                Err(error) if is_per_connection_error(&error) => {}
                Err(error) => {
                    error!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    /// Returns the address that the listener is bound to.
    ///
    /// # Errors
    ///
    /// Fails whenever [`TcpListener::local_addr`] does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Returns `true` if the error only means that a connection ended before it was accepted.
fn is_per_connection_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
    )
}
