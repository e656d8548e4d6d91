//! A TCP stream whose peer can be watched while hyper owns it.
//!
//! It reads and writes as tokio's own `TcpStream` does, by the methods that take a shared reference. Like tokio, it saves a
//! system call: after a read that did not fill the buffer (a write that did not empty it) the socket is known to be drained
//! (full), and the readiness seen *before* it is cleared.

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

/// Only where the kernel tells of changes (epoll, kqueue) does a short transfer mean that the next would block.
const IS_EDGE_TRIGGERED: bool = cfg!(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple"
));

/// The number of unsent bytes from which on the kernel takes no more: 32 KiB (`TCP_NOTSENT_LOWAT`), and up to one segment of
/// 64 KiB beyond. Chosen because a client that reads 10 KB/s takes them in 10 s. The bytes under way to the client, which decide
/// the throughput, do not count.
#[cfg(any(target_os = "linux", target_os = "android"))]
const MAX_UNSENT: u32 = 32 * 1024;

/// A TCP stream whose peer can be watched. [`WatchedListener`](super::WatchedListener) accepts such streams.
///
/// An accept loop of your own, around hyper for example, puts the [`Peer`] into the extensions of the requests, where the layer
/// looks for it.
///
/// ```
/// use mcp_cancel_on_disconnect::socket::WatchedStream;
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
    /// Takes over a stream, with the address that came with it from `accept`.
    ///
    /// On Linux and Android the kernel then holds about 100 KiB at most that it has not sent (`TCP_NOTSENT_LOWAT`). So a slow client is
    /// seen reading by [`stall_timeout`](crate::CancelOnDisconnectLayer::stall_timeout), and an answer for a client that does not
    /// read takes little memory of the kernel.
    pub fn new(stream: TcpStream, addr: SocketAddr) -> Self {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        // A kernel without it only buffers more.
        let _best_effort = SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT);
        let let_go = AtomicBool::new(false);
        Self {
            shared: Arc::new(SharedStream {
                stream,
                is_dropped: let_go,
            }),
            addr,
        }
    }

    /// The other end of the connection, which can be watched while hyper owns the stream.
    pub fn peer(&self) -> Peer {
        Peer::new(self.addr, Arc::downgrade(&self.shared))
    }

    /// The stream itself, for options such as `set_nodelay`. Reading or writing here would confuse its owner.
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
        // A short write says nothing here: the kernel takes a limited number of buffers at a time.
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
            // The peer has reset the connection: it is shut down more thoroughly than asked.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

/// Runs `io` when the stream is ready for it.
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
            moved => return Poll::Ready(moved),
        }
    }
}

/// Runs `io`, and clears the readiness if less than `wanted` bytes went through.
///
/// `try_io` notes the readiness before it runs its closure, and clears no more than that if the closure says
/// `WouldBlock`. So what arrives meanwhile is not lost, which a call after the transfer could not promise.
fn transfer(
    stream: &TcpStream,
    interest: Interest,
    wanted: usize,
    io: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    let mut moved = 0;
    let noted = stream.try_io(interest, || {
        moved = io()?;
        // Nothing is the end of the stream: that is ready for good.
        let drained = IS_EDGE_TRIGGERED && 0 < moved && moved < wanted;
        if drained {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    });
    match noted {
        Err(_) if moved > 0 => Ok(moved),
        noted => noted.map(|()| moved),
    }
}

impl Drop for WatchedStream {
    /// Those who await the peer's end hold the socket open. Shutting down the read side sends nothing, wakes them, and
    /// shows them that there is nothing to wait for any more.
    fn drop(&mut self) {
        self.shared.is_dropped.store(true, Ordering::Release);
        if SharedStream::CAN_BE_WATCHED {
            // It fails when the connection is gone, and then they are awake.
            let _woken = SockRef::from(self.tcp()).shutdown(Shutdown::Read);
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
