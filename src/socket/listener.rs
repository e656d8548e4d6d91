//! An axum listener whose connections can be watched.

use std::{io, net::SocketAddr, time::Duration};

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener, TapIo},
};
use tokio::net::TcpListener;
use tracing::error;

use super::{peer::Peer, stream::WatchedStream};

/// How long nothing is accepted after an error that is not of one connection, such as too many open files.
const PAUSE: Duration = Duration::from_secs(1);

/// A listener for `axum::serve` that lets the layer see each connection's [`Peer`].
///
/// With it a client's hang-up is noticed although hyper does not read: bytes of a next request wait in its
/// buffer, or the handler left its request body unread. On plain `TcpListener`s that takes until a write fails,
/// and for ever if nothing is written.
///
/// ```
/// use axum::{Router, serve::ListenerExt};
/// use mcp_cancel_on_disconnect::{DeadPeer, Peer, WatchedListener};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// DeadPeer::new().apply(&listener)?;
/// let listener = WatchedListener::new(listener).tap_io(|stream| {
///     let _ = stream.tcp().set_nodelay(true);
/// });
/// let app: Router = Router::new(); // .layer(CancelOnDisconnectLayer::new())
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
    /// Takes over a listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener }
    }
}

impl Listener for WatchedListener {
    type Io = WatchedStream;
    type Addr = SocketAddr;

    /// Errors are met as axum meets them on a `TcpListener`.
    async fn accept(&mut self) -> (WatchedStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, addr)) => return (WatchedStream::new(stream, addr), addr),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    error!(target: "mcp_cancel_on_disconnect", %error, "accept failed");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Whether the error says only that the connection ended before it was accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
    )
}

impl Connected<IncomingStream<'_, WatchedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, WatchedListener>) -> Self {
        stream.io().peer()
    }
}

impl<F> Connected<IncomingStream<'_, TapIo<WatchedListener, F>>> for Peer
where
    F: FnMut(&mut WatchedStream) + Send + 'static,
{
    fn connect_info(stream: IncomingStream<'_, TapIo<WatchedListener, F>>) -> Self {
        stream.io().peer()
    }
}
