//! The network between instances: TCP, or a simulated one in this crate's tests.
//!
//! Outside of tests, [`Network`] and [`Stream`] each have a single variant, so matching on them does not even cost a branch.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use mcp_cancel_on_disconnect::socket::{DeadPeer, Peer, WatchedListener, WatchedStream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Opens connections to peers.
#[derive(Debug, Default)]
pub(crate) enum Network {
    #[default]
    Tcp,
    #[cfg(test)]
    Simulated(Box<dyn simulated::Dialer>),
}

/// A connection opened by a [`Network`].
pub(crate) enum Stream {
    Tcp(TcpStream),
    #[cfg(test)]
    Simulated(Box<dyn simulated::Duplex>),
}

/// Accepts peer connections.
pub(crate) trait Listener: Send + 'static {
    type Stream: Accepted;

    /// Returns the next connection and its peer's address. Cancel safe.
    fn accept(&self) -> impl Future<Output = (Self::Stream, SocketAddr)> + Send;
}

/// A connection accepted by a [`Listener`].
pub(crate) trait Accepted: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Returns the kernel's view of the peer, or `None` for a simulated connection.
    fn peer(&self) -> Option<Peer>;
}

// === impl Network ===

impl Network {
    /// Opens a connection. It is up to the caller to apply a timeout.
    pub(crate) async fn connect(&self, address: SocketAddr) -> io::Result<Stream> {
        match self {
            Self::Tcp => connect(address).await.map(Stream::Tcp),
            #[cfg(test)]
            Self::Simulated(dialer) => dialer.dial(address).await.map(Stream::Simulated),
        }
    }
}

/// Returns socket options for detecting an owner that has sent nothing new for 30 s.
///
/// If nothing from this instance reaches the owner, the owner takes 90 s to detect that. In this kind of one-way partition, this instance's
/// clients therefore count as turned away before the owner considers their calls detached. The owner's retransmissions do not delay the
/// detection.
fn dead_owner_options() -> DeadPeer {
    let second = Duration::from_secs(1);
    let probes = DeadPeer::new().idle(10 * second).interval(5 * second);
    probes.probes(4).user_timeout(30 * second)
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    // On a single machine, a connection to a port without a listener can end up connected to itself.
    if stream.local_addr().is_ok_and(|local| local == address) {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    // Nagle's algorithm would hold back a small write for up to 40 ms, until the previous write is acknowledged.
    let _ = stream.set_nodelay(true);
    // Options unknown to the kernel are skipped.
    let _ = dead_owner_options().apply(&stream);
    Ok(stream)
}

// === impl Stream ===

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            #[cfg(test)]
            Self::Simulated(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            #[cfg(test)]
            Self::Simulated(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            #[cfg(test)]
            Self::Simulated(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            #[cfg(test)]
            Self::Simulated(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            #[cfg(test)]
            Self::Simulated(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            #[cfg(test)]
            Self::Simulated(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

// === impl WatchedListener ===

impl Listener for WatchedListener {
    type Stream = WatchedStream;

    async fn accept(&self) -> (WatchedStream, SocketAddr) {
        let (stream, address) = self.accept().await;
        // Nagle's algorithm would delay small events.
        let _ = stream.tcp().set_nodelay(true);
        (stream, address)
    }
}

impl Accepted for WatchedStream {
    fn peer(&self) -> Option<Peer> {
        Some(self.peer())
    }
}

/// The interface that a simulated network implements.
#[cfg(test)]
pub(crate) mod simulated {
    use std::fmt::Debug;

    use futures_util::future::BoxFuture;

    use super::{AsyncRead, AsyncWrite, SocketAddr, io};

    /// A bidirectional byte stream.
    pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

    impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

    /// Opens simulated connections.
    pub(crate) trait Dialer: Debug + Send + Sync {
        fn dial(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Duplex>>>;
    }
}
