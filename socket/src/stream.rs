//! A TCP stream whose peer can be watched while hyper owns it.
//!
//! It reads and writes just like tokio's own `TcpStream`, but through the methods that take a shared reference. Like tokio, it
//! saves a system call after a short transfer: a read that has not filled the buffer has drained the socket, and a write that
//! has not emptied the buffer has filled the socket, so the readiness recorded before the transfer is cleared.

use std::{
    fmt,
    io::{self, IoSlice},
    net::{Shutdown, SocketAddr},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
};

use super::peer::{Peer, SharedStream};

/// Whether the kernel reports only changes in readiness. If so, another transfer after a short one would block.
const IS_EDGE_TRIGGERED: bool = cfg!(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple"
));

/// Maximum number of unsent bytes in the kernel (`TCP_NOTSENT_LOWAT`).
///
/// The kernel may exceed this by one segment of 64 KiB. A client that reads 10 KB/s drains that within 10 s. Bytes in flight,
/// which determine the throughput, are not limited.
#[cfg(any(target_os = "linux", target_os = "android"))]
const MAX_UNSENT: u32 = 32 * 1024;

/// A TCP stream whose peer can be watched, as accepted by a [`WatchedListener`](super::WatchedListener).
///
/// You can also create one in your own accept loop, for example around hyper. In that case, put its [`Peer`] into the
/// extensions of every request, where [`Peer::of`] finds it.
///
/// ```
/// use watched_socket::WatchedStream;
/// use tokio::net::{TcpListener, TcpStream};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let listener = TcpListener::bind("127.0.0.1:0").await?;
/// let client = TcpStream::connect(listener.local_addr()?).await?;
/// let (stream, addr) = listener.accept().await?;
/// let stream = WatchedStream::new(stream, addr);
/// let peer = stream.peer();
/// assert_eq!(stream.tcp().peer_addr()?, client.local_addr()?);
/// # let serve = |_: &WatchedStream| ();
/// serve(&stream); // `request.extensions_mut().insert(peer.clone())` for every request
///
/// drop(client);
/// # #[cfg(target_os = "linux")]
/// # {
/// peer.closed().await;
/// assert!(peer.is_closed());
/// # }
/// # Ok(())
/// # }
/// ```
pub struct WatchedStream {
    shared: Arc<SharedStream>,
    addr: SocketAddr,
}

// === impl WatchedStream ===

impl WatchedStream {
    /// Wraps a stream. `addr` is the client's address, as returned by `accept`.
    ///
    /// On Linux and Android, the kernel then buffers at most about 100 KiB of unsent bytes (`TCP_NOTSENT_LOWAT`). That way, a
    /// server detects within seconds that a slow client is reading, and a response to a client that is not reading takes up
    /// little kernel memory.
    pub fn new(stream: TcpStream, addr: SocketAddr) -> Self {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        // Ignore errors, because a kernel without this option just buffers more.
        let _ = SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT);
        let is_dropped = AtomicBool::new(false);
        Self {
            shared: Arc::new(SharedStream { stream, is_dropped }),
            addr,
        }
    }

    /// Returns the other end of the connection, which can be watched while hyper owns the stream.
    pub fn peer(&self) -> Peer {
        Peer::new(self.addr, Arc::downgrade(&self.shared))
    }

    /// Returns the stream, to set options such as `set_nodelay`. Do not read from it or write to it, because hyper does.
    pub fn tcp(&self) -> &TcpStream {
        &self.shared.stream
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.tcp();
        let room = buf.remaining();
        let read = || stream.try_read_buf(buf);
        poll_transfer(stream, cx, Interest::READABLE, room, read).map_ok(drop)
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream = self.tcp();
        let write = || stream.try_write(buf);
        poll_transfer(stream, cx, Interest::WRITABLE, buf.len(), write)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let stream = self.tcp();
        let write = || stream.try_write_vectored(bufs);
        // A short write does not mean that the socket is full, because the kernel accepts a limited number of buffers at a time.
        poll_transfer(stream, cx, Interest::WRITABLE, 0, write)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match SockRef::from(self.tcp()).shutdown(Shutdown::Write) {
            // The peer has reset the connection, so it is already shut down.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            result => Poll::Ready(result),
        }
    }
}

/// Runs `io` once the stream is ready for it.
fn poll_transfer(
    stream: &TcpStream,
    cx: &mut Context<'_>,
    interest: Interest,
    wanted: usize,
    mut io: impl FnMut() -> io::Result<usize>,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(if interest.is_readable() {
            stream.poll_read_ready(cx)
        } else {
            stream.poll_write_ready(cx)
        })?;
        match transfer(stream, interest, wanted, &mut io) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
    }
}

/// Runs `io`. Clears the readiness after a short transfer if the kernel is edge-triggered.
///
/// A transfer is short if it moved fewer than `wanted` bytes.
///
/// `try_io` records the readiness before it runs its closure. If the closure returns `WouldBlock`, it clears only what it has
/// recorded, so readiness that arrives in the meantime is not lost, as it could be if it were cleared after the transfer.
fn transfer(
    stream: &TcpStream,
    interest: Interest,
    wanted: usize,
    io: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    let mut moved = 0;
    let result = stream.try_io(interest, || {
        moved = io()?;
        // Zero bytes mean that the stream has ended, in which case it stays ready.
        let is_short = 0 < moved && moved < wanted;
        if IS_EDGE_TRIGGERED && is_short {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    });
    match result {
        Err(_) if moved > 0 => Ok(moved),
        result => result.map(|()| moved),
    }
}

impl Drop for WatchedStream {
    /// Wakes the tasks awaiting the peer, because they hold the socket open.
    ///
    /// Shutting down the read side ends their wait without sending a packet.
    fn drop(&mut self) {
        self.shared.is_dropped.store(true, Ordering::Release);
        if SharedStream::CAN_BE_WATCHED {
            // This fails if the connection is already closed, in which case the tasks have already been woken.
            let _ = SockRef::from(self.tcp()).shutdown(Shutdown::Read);
        }
    }
}

#[cfg(unix)]
impl std::os::fd::AsFd for WatchedStream {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.tcp().as_fd()
    }
}

#[cfg(windows)]
impl std::os::windows::io::AsSocket for WatchedStream {
    fn as_socket(&self) -> std::os::windows::io::BorrowedSocket<'_> {
        self.tcp().as_socket()
    }
}

impl fmt::Debug for WatchedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedStream")
            .field("peer", &self.addr)
            .finish_non_exhaustive()
    }
}
