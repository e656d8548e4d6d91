//! The other end of a connection, watched while hyper owns the stream.

use std::{
    fmt, future,
    net::SocketAddr,
    sync::{Weak, atomic::AtomicBool},
};
#[cfg(any(target_os = "linux", target_os = "android"))]
use std::{io, sync::atomic::Ordering};

#[cfg(feature = "axum")]
use axum::extract::ConnectInfo;
use http::Extensions;
#[cfg(any(target_os = "linux", target_os = "android"))]
use tokio::io::Interest;
use tokio::net::TcpStream;

/// The client's end of a connection.
///
/// In your own accept loop, put [`WatchedStream::peer`](super::WatchedStream::peer) into the extensions of every request. With
/// the `axum` feature, [`WatchedListener`](super::WatchedListener) and `into_make_service_with_connect_info::<Peer>()` insert a
/// `ConnectInfo<Peer>` instead. Handlers can use the peer, too:
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{Router, extract::ConnectInfo, routing::get};
/// use watched_socket::{Peer, WatchedListener};
///
/// async fn report(ConnectInfo(peer): ConnectInfo<Peer>) -> String {
///     if peer.is_closed() {
///         return "the client disconnected".to_owned();
///     }
///     tokio::select! {
///         () = peer.closed() => format!("{} disconnected", peer.addr()),
///         () = std::future::ready(()) => "the report".to_owned(),
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let app: Router = Router::new().route("/report", get(report));
/// let listener = WatchedListener::new(tokio::net::TcpListener::bind("127.0.0.1:0").await?);
/// let server = axum::serve(listener, app.into_make_service_with_connect_info::<Peer>());
/// assert!(server.local_addr()?.port() > 0);
/// # Ok(())
/// # }
/// ```
///
/// Storing a `Peer` does not keep the connection open.
#[derive(Clone)]
pub struct Peer {
    addr: SocketAddr,
    shared: Weak<SharedStream>,
}

/// A stream shared by its owner and the tasks awaiting its peer.
pub(super) struct SharedStream {
    pub(super) stream: TcpStream,
    /// Whether the [`WatchedStream`](super::WatchedStream) has been dropped. If the read side is closed after that, this side
    /// has closed it.
    pub(super) is_dropped: AtomicBool,
}

// === impl Peer ===

impl Peer {
    pub(super) fn new(addr: SocketAddr, shared: Weak<SharedStream>) -> Self {
        Self { addr, shared }
    }

    /// Returns the peer for a request's connection, or `None` if the connection is not watched.
    ///
    /// This finds both the `Peer` that your own accept loop inserts and the `ConnectInfo<Peer>` that `axum::serve` inserts
    /// (feature `axum`).
    ///
    /// ```
    /// use watched_socket::Peer;
    ///
    /// let request = http::Request::new(());
    /// assert!(Peer::of(request.extensions()).is_none());
    /// ```
    pub fn of(extensions: &Extensions) -> Option<&Self> {
        extensions.get().or_else(|| Self::of_axum(extensions))
    }

    #[cfg(feature = "axum")]
    fn of_axum(extensions: &Extensions) -> Option<&Self> {
        let ConnectInfo(peer) = extensions.get()?;
        Some(peer)
    }

    #[cfg(not(feature = "axum"))]
    fn of_axum(_: &Extensions) -> Option<&Self> {
        None
    }

    /// Returns the client's address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns this `Peer` with a different address.
    ///
    /// This is for servers behind a proxy that forwards the client's address. The connection being watched is still the one to
    /// the proxy.
    ///
    /// ```
    /// use std::net::SocketAddr;
    /// use watched_socket::WatchedListener;
    /// use tokio::net::{TcpListener, TcpStream};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// let listener = WatchedListener::new(TcpListener::bind("127.0.0.1:0").await?);
    /// let proxy = TcpStream::connect(listener.local_addr()?).await?;
    /// let (stream, _) = listener.accept().await;
    ///
    /// let client = SocketAddr::from(([192, 0, 2, 1], 4711));
    /// let peer = stream.peer().with_addr(client);
    /// assert_eq!(peer.addr(), client);
    /// drop(proxy);
    /// while !peer.is_closed() {
    ///     tokio::task::yield_now().await;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_addr(mut self, addr: SocketAddr) -> Self {
        self.addr = addr;
        self
    }

    /// Waits until the peer has closed the connection, as far as the kernel knows.
    ///
    /// The kernel knows once it has received a FIN or an RST from the peer, or once it has given up after its own retries (see
    /// [`DeadPeer`](super::DeadPeer)).
    ///
    /// This does not require a read or a write, and works even while there are unread bytes from the peer.
    /// [`WatchedStream`](super::WatchedStream) has an example.
    ///
    /// - If this side closes the connection first, or the runtime shuts down, the future releases the socket and never
    ///   completes.
    /// - A peer that has only shut down its sending side, and is still reading, counts as disconnected, just as it does in
    ///   hyper. Do not await this future on a server that sets hyper's `half_close`.
    /// - The future completes only on Linux and Android.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost if this future is dropped. Any number of these futures can wait at the same time.
    pub async fn closed(&self) {
        if let Some(shared) = self.shared.upgrade()
            && shared.closed_by_peer().await
        {
            return;
        }
        future::pending().await
    }

    /// Returns `true` if [`closed`](Self::closed) would complete at once.
    ///
    /// Returns `false` if this side has closed the connection, and always on systems other than Linux and Android.
    pub fn is_closed(&self) -> bool {
        self.shared
            .upgrade()
            .is_some_and(|shared| shared.is_closed_by_peer())
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

// === impl SharedStream ===

#[cfg(any(target_os = "linux", target_os = "android"))]
impl SharedStream {
    pub(super) const CAN_BE_WATCHED: bool = true;

    /// Waits until our read side is closed. Returns `true` unless this side has closed it or the runtime is shutting down.
    ///
    /// tokio registers every TCP stream with epoll for `EPOLLRDHUP`. "Priority" is the only interest that reports this without
    /// also reporting data. Unlike `poll_read_ready`, `ready` supports any number of wakers, so all of a connection's requests
    /// can wait at the same time as hyper.
    pub(super) async fn closed_by_peer(&self) -> bool {
        loop {
            let ready = self.stream.ready(Interest::PRIORITY).await;
            if self.is_dropped.load(Ordering::Acquire) {
                return false;
            }
            match ready {
                Ok(ready) if ready.is_read_closed() => return true,
                // This is not expected, because tokio does not register for urgent data. Clear the readiness to prevent a busy loop.
                Ok(_) => {
                    let unblock = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                    let _ = self.stream.try_io(Interest::PRIORITY, unblock);
                }
                // The runtime is shutting down.
                Err(_) => return false,
            }
        }
    }

    /// Returns `true` if our read side is already closed, and this side has not closed it.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        let closed = self.stream.try_io(Interest::PRIORITY, || Ok(()));
        closed.is_ok() && !self.is_dropped.load(Ordering::Acquire)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
impl SharedStream {
    pub(super) const CAN_BE_WATCHED: bool = false;

    pub(super) async fn closed_by_peer(&self) -> bool {
        false
    }

    pub(super) fn is_closed_by_peer(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn peer(port: u16) -> Peer {
        Peer::new((Ipv4Addr::LOCALHOST, port).into(), Weak::new())
    }

    #[test]
    fn a_peer_in_the_extensions_takes_precedence_over_connect_info() {
        let mut extensions = Extensions::new();
        assert!(Peer::of(&extensions).is_none());

        #[cfg(feature = "axum")]
        {
            extensions.insert(ConnectInfo(peer(1)));
            let found = Peer::of(&extensions).map(|peer| peer.addr().port());
            assert_eq!(found, Some(1));
        }

        extensions.insert(peer(2));
        assert_eq!(
            Peer::of(&extensions).map(|peer| peer.addr().port()),
            Some(2)
        );
    }

    #[tokio::test]
    async fn a_peer_without_a_connection_is_never_closed() {
        let peer = peer(1);
        assert!(futures_util::poll!(std::pin::pin!(peer.closed())).is_pending());
        assert!(!peer.is_closed());
    }
}
