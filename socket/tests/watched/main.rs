//! Disconnects while the server does not read.
//!
//! The tests show which disconnects are detected, which events do not count as one, and what watching costs.

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod disconnects;
mod served;
mod stream;

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use watched_socket::{Peer, WatchedStream};

/// A future that waits for a peer to close, and counts how often it is woken.
struct CountedWakes<F> {
    future: Pin<Box<F>>,
    wakes: Arc<Wakes>,
    /// Number of wakes before the last poll.
    seen: usize,
}

#[derive(Default)]
struct Wakes {
    count: AtomicUsize,
    waiting: AtomicWaker,
}

/// Opens a connection whose server end is not read. Returns that stream, its peer, and the client's end.
async fn unread() -> (WatchedStream, Peer, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let client = TcpStream::connect(addr).await.unwrap();
    let (stream, addr) = listener.accept().await.unwrap();
    let stream = WatchedStream::new(stream, addr);
    let peer = stream.peer();
    assert_eq!(peer.addr(), client.local_addr().unwrap());
    (stream, peer, client)
}

/// Closes the client's end with an RST.
fn reset(client: TcpStream) {
    SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}

// === impl CountedWakes ===

impl CountedWakes<()> {
    fn new(peer: Peer) -> CountedWakes<impl Future<Output = ()>> {
        CountedWakes {
            future: Box::pin(async move { peer.closed().await }),
            wakes: Arc::default(),
            seen: 0,
        }
    }
}

impl<F: Future> CountedWakes<F> {
    fn poll_once(&mut self) -> Poll<F::Output> {
        self.seen = self.wakes();
        let waker = Waker::from(self.wakes.clone());
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    fn wakes(&self) -> usize {
        self.wakes.count.load(Ordering::SeqCst)
    }

    /// Waits until the future has been woken since its last poll. Does not poll it.
    async fn woken(&self) {
        std::future::poll_fn(|cx| {
            self.wakes.waiting.register(cx.waker());
            if self.wakes() > self.seen {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

impl<F: Future> Future for CountedWakes<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.wakes.waiting.register(cx.waker());
        self.poll_once()
    }
}

// === impl Wakes ===

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.waiting.wake();
    }
}
