//! A connection that its owner and those who wait for its other end share.

use std::sync::atomic::AtomicBool;
#[cfg(any(target_os = "linux", target_os = "android"))]
use std::{io, sync::atomic::Ordering};

#[cfg(any(target_os = "linux", target_os = "android"))]
use tokio::io::Interest;
use tokio::net::TcpStream;

/// What the stream and those who await its peer's end have in common.
pub(super) struct Shared {
    pub(super) stream: TcpStream,
    /// Set when the [`WatchedStream`](super::WatchedStream) goes: what happens to the socket from then on is this side's doing.
    pub(super) let_go: AtomicBool,
}

// === impl Shared ===

#[cfg(any(target_os = "linux", target_os = "android"))]
impl Shared {
    pub(super) const CAN_BE_WATCHED: bool = true;

    /// Waits until no more can come from the peer; true if that is not this side's doing.
    ///
    /// tokio asks epoll for `EPOLLRDHUP` with every TCP stream. "Priority" is the one interest that is told of it
    /// and not of mere data. It has no single slot for a waker, as reading and writing have, so that requests
    /// which share a connection can all wait, and hyper with them.
    pub(super) async fn closed_by_peer(&self) -> bool {
        loop {
            let ready = self.stream.ready(Interest::PRIORITY).await;
            if self.let_go.load(Ordering::Acquire) {
                return false;
            }
            match ready {
                Ok(ready) if ready.is_read_closed() => return true,
                // Not known to happen: tokio does not ask for urgent data. Cleared, it cannot make this spin.
                Ok(_) => {
                    let unblock = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                    let _cleared = self.stream.try_io(Interest::PRIORITY, unblock);
                }
                // The runtime shuts down.
                Err(_) => return false,
            }
        }
    }

    /// The same as far as it is known now.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        let closed = self.stream.try_io(Interest::PRIORITY, || Ok(()));
        closed.is_ok() && !self.let_go.load(Ordering::Acquire)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
impl Shared {
    pub(super) const CAN_BE_WATCHED: bool = false;

    pub(super) async fn closed_by_peer(&self) -> bool {
        false
    }

    pub(super) fn is_closed_by_peer(&self) -> bool {
        false
    }
}
