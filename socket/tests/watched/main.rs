//! Which disconnects are detected although the server does not read, which sockets are not closed, and what watching costs.

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod hang_ups;
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

/// A future, polled only when it was woken, and how often that was.
struct Counted<F> {
    future: Pin<Box<F>>,
    wakes: Arc<Wakes>,
    /// How many wakes there had been when it was last polled.
    seen: usize,
}

#[derive(Default)]
struct Wakes {
    count: AtomicUsize,
    waiting: AtomicWaker,
}

/// Returns a watched stream that is not read, its peer, and the client's end.
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

fn reset(client: TcpStream) {
    SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}

// === impl Counted ===

impl Counted<()> {
    fn new(peer: Peer) -> Counted<impl Future<Output = ()>> {
        Counted {
            future: Box::pin(async move { peer.closed().await }),
            wakes: Arc::default(),
            seen: 0,
        }
    }
}

impl<F: Future> Counted<F> {
    fn poll_once(&mut self) -> Poll<F::Output> {
        self.seen = self.wakes();
        let waker = Waker::from(self.wakes.clone());
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    fn wakes(&self) -> usize {
        self.wakes.count.load(Ordering::SeqCst)
    }

    /// Waits until it was woken since it was last polled, and does not poll it.
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

impl<F: Future> Future for Counted<F> {
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
