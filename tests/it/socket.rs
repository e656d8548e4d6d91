//! A watched socket: who is gone although nobody reads, who is not, and what watching costs.

use std::{
    io::{ErrorKind, IoSlice},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use axum::{
    Router,
    extract::{ConnectInfo, Request as AxumRequest},
    routing::any,
    serve::ListenerExt as _,
};
use futures_util::task::AtomicWaker;
use mcp_cancel_on_disconnect::{DeadPeer, Peer, WatchedListener, WatchedStream};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use crate::support::{Connection, Request, within};

/// A watched stream that nobody reads, its peer, and the client's end.
struct Unread {
    stream: WatchedStream,
    peer: Peer,
    client: TcpStream,
}

/// A server whose handler takes no body, hands out its peer and never answers.
struct Deaf {
    peers: mpsc::UnboundedReceiver<Peer>,
    connection: Connection,
}

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

// === Somebody hangs up ===

#[tokio::test]
async fn a_fin_behind_unread_bytes_is_noticed() {
    let Unread {
        stream: _stream,
        peer,
        mut client,
    } = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    drop(client);
    within("the peer to go", peer.gone()).await;
    assert!(peer.is_gone());
}

#[tokio::test]
async fn a_reset_behind_unread_bytes_is_noticed() {
    let Unread {
        stream: _stream,
        peer,
        mut client,
    } = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    reset(client);
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn a_half_close_counts_as_gone() {
    let Unread {
        stream: _stream,
        peer,
        mut client,
    } = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn a_peer_that_had_gone_before_anybody_asked_is_gone() {
    let Unread {
        stream: _stream,
        peer,
        client,
    } = unread().await;
    drop(client);
    within("the first to ask", peer.gone()).await;
    within("the second to ask", peer.clone().gone()).await;
}

#[tokio::test]
async fn everybody_who_waits_is_told() {
    let Unread {
        stream: _stream,
        peer,
        client,
    } = unread().await;
    let mut waiting: Vec<_> = (0..100).map(|_| Counted::new(peer.clone())).collect();
    for one in &mut waiting {
        assert!(one.poll_once().is_pending());
    }
    drop(client);
    for one in waiting {
        within("one of a hundred", one).await;
    }
}

// === Nobody hangs up ===

#[tokio::test]
async fn data_that_nobody_reads_wakes_nobody() {
    const SEGMENTS: usize = 200;
    let Unread {
        stream,
        peer,
        mut client,
    } = unread().await;
    let mut gone = Counted::new(peer);
    assert!(gone.poll_once().is_pending());

    client.set_nodelay(true).unwrap();
    let mut seen = [0; SEGMENTS];
    for sent in 1..=SEGMENTS {
        client.write_all(b"x").await.unwrap();
        // One by one, so that the kernel has a reason to tell of each.
        while within("a segment", stream.tcp().peek(&mut seen))
            .await
            .unwrap()
            < sent
        {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(gone.wakes(), 0);

    drop(client);
    let wakes = gone.wakes.clone();
    within("the peer to go", gone).await;
    assert_eq!(wakes.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_idle_connection_raises_no_alarm() {
    let Unread {
        mut stream,
        peer,
        mut client,
    } = unread().await;
    let mut gone = Counted::new(peer.clone());
    assert!(gone.poll_once().is_pending());
    for _ in 0..10 {
        client.write_all(b"ping").await.unwrap();
        let mut ping = [0; 4];
        stream.read_exact(&mut ping).await.unwrap();
        stream.write_all(b"pong").await.unwrap();
        client.read_exact(&mut ping).await.unwrap();
    }
    assert_eq!(gone.wakes(), 0);
    assert!(!peer.is_gone());
}

#[tokio::test]
async fn urgent_data_raises_no_alarm() {
    let Unread {
        mut stream,
        peer,
        mut client,
    } = unread().await;
    let mut gone = Counted::new(peer.clone());
    assert!(gone.poll_once().is_pending());
    SockRef::from(&client).send_out_of_band(b"!").unwrap();
    client.write_all(b"x").await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    assert!(gone.poll_once().is_pending());
    assert!(!peer.is_gone());
}

// === This side hangs up ===

#[tokio::test]
async fn a_kept_peer_keeps_no_connection_open() {
    let Unread {
        stream,
        peer,
        mut client,
    } = unread().await;
    let mut extensions = http::Extensions::new();
    extensions.insert(peer.clone());
    drop(stream);
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);
    assert!(!peer.is_gone());
}

#[tokio::test]
async fn whoever_waits_lets_go_of_a_dropped_stream_when_next_polled() {
    let Unread {
        stream,
        peer,
        mut client,
    } = unread().await;
    let mut gone = Counted::new(peer.clone());
    assert!(gone.poll_once().is_pending());
    drop(stream);
    within("a wake", gone.woken()).await;
    assert!(gone.poll_once().is_pending(), "this side let go");
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);

    drop(client);
    assert!(gone.poll_once().is_pending());
    assert!(!peer.is_gone());
}

#[tokio::test]
async fn a_shut_down_write_side_is_not_the_peer_that_goes() {
    let Unread {
        mut stream,
        peer,
        mut client,
    } = unread().await;
    let mut gone = Counted::new(peer);
    assert!(gone.poll_once().is_pending());
    stream.shutdown().await.unwrap();
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);
    client.write_all(b"x").await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    assert!(gone.poll_once().is_pending());

    drop(client);
    within("the peer to go", gone).await;
}

// === As a stream ===

#[tokio::test]
async fn megabytes_go_both_ways_through_full_buffers() {
    let Unread {
        stream,
        peer: _peer,
        client,
    } = unread().await;
    let data: Vec<u8> = (0..8_000_000_u32).map(|at| (at % 251) as u8).collect();
    let (mut back, mut out) = tokio::io::split(stream);
    let (mut echoed, mut sent) = client.into_split();
    let echo = async {
        tokio::io::copy(&mut back, &mut out).await.unwrap();
        out.shutdown().await.unwrap();
    };
    let send = async {
        sent.write_all(&data).await.unwrap();
        sent.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let receive = echoed.read_to_end(&mut received);
    let (_, _, received_all) =
        within("the echo", async { tokio::join!(echo, send, receive) }).await;
    received_all.unwrap();
    assert!(received == data, "every byte came back in its place");
}

#[tokio::test]
async fn more_slices_than_the_kernel_takes_are_written_bit_by_bit() {
    const SLICES: usize = 5_000;
    let Unread {
        mut stream,
        peer: _peer,
        mut client,
    } = unread().await;
    let send = async {
        let mut slices = &mut vec![IoSlice::new(b"x"); SLICES][..];
        while !slices.is_empty() {
            let written = stream.write_vectored(slices).await.unwrap();
            IoSlice::advance_slices(&mut slices, written);
        }
    };
    within("the slices to go out", send).await;
    client.read_exact(&mut [0; SLICES]).await.unwrap();
}

#[tokio::test]
async fn a_reset_stream_fails_and_still_shuts_down() {
    let Unread {
        mut stream,
        peer,
        client,
    } = unread().await;
    reset(client);
    within("the peer to go", peer.gone()).await;
    let error = stream.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    stream.shutdown().await.unwrap();
}

// === Under axum::serve ===

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_fin() {
    let mut deaf = Deaf::serve().await;
    let peer = deaf.ask(&Request::new("GET", "/")).await;
    deaf.connection.send(&Request::new("GET", "/next")).await;
    deaf.connection.fin();
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_reset() {
    let mut deaf = Deaf::serve().await;
    let peer = deaf.ask(&Request::new("GET", "/")).await;
    deaf.connection.send(&Request::new("GET", "/next")).await;
    deaf.connection.rst();
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn a_stray_line_end_does_not_hide_a_fin() {
    let mut deaf = Deaf::serve().await;
    let request = Request::new("POST", "/").body("{}");
    let peer = deaf.ask(&request).await;
    deaf.connection.write(b"\r\n").await;
    deaf.connection.fin();
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_half_close() {
    let mut deaf = Deaf::serve().await;
    let peer = deaf.ask(&Request::new("GET", "/")).await;
    deaf.connection.send(&Request::new("GET", "/next")).await;
    deaf.connection.half_close().await;
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn an_unread_body_does_not_hide_a_reset() {
    let mut deaf = Deaf::serve().await;
    let request = Request::new("POST", "/").body(vec![b'x'; 1_000_000]);
    let peer = deaf.ask(&request).await;
    deaf.connection.rst();
    within("the peer to go", peer.gone()).await;
}

#[tokio::test]
async fn every_request_of_a_connection_finds_its_peer() {
    let app = Router::new()
        .fallback(async |ConnectInfo(peer): ConnectInfo<Peer>| peer.addr().to_string());
    let addr = serve(app).await;
    let mut connection = Connection::open(addr).await;
    let mut told = Vec::new();
    for _ in 0..2 {
        connection.send(&Request::new("GET", "/")).await;
        told.push(connection.reply().await.text().to_owned());
    }
    assert!(told[0].starts_with("127.0.0.1:"));
    assert_eq!(told[0], told[1]);
}

#[tokio::test]
async fn the_server_closes_a_connection_although_somebody_waits_for_its_peer() {
    let (hand_out, mut peers) = mpsc::unbounded_channel();
    let app = Router::new().fallback(async move |ConnectInfo(peer): ConnectInfo<Peer>| {
        hand_out.send(peer).unwrap();
    });
    let addr = serve(app).await;
    let mut connection = Connection::open(addr).await;
    let request = Request::new("GET", "/").header("connection", "close");
    connection.send(&request).await;
    let peer = within("the handler", peers.recv()).await.unwrap();
    let mut gone = Counted::new(peer);
    let watching = async {
        // Polled whenever it is woken, as a task would be.
        loop {
            assert!(gone.poll_once().is_pending(), "the client stays");
            gone.woken().await;
        }
    };
    tokio::select! {
        () = watching => {}
        _ = connection.closed() => {}
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_tapped_listener_hands_out_peers_and_streams_take_options() {
    let (hand_out, mut peers) = mpsc::unbounded_channel();
    let app = Router::new().fallback(async move |ConnectInfo(peer): ConnectInfo<Peer>| {
        hand_out.send(peer).unwrap();
    });
    let (tell, mut limits) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let listener = WatchedListener::new(listener).tap_io(move |stream| {
        let options = DeadPeer::new().user_timeout(Duration::from_secs(21));
        options.apply(stream).unwrap();
        tell.send(SockRef::from(&*stream).tcp_user_timeout().unwrap())
            .unwrap();
    });
    let make = app.into_make_service_with_connect_info::<Peer>();
    spawn(async move { axum::serve(listener, make).await.unwrap() });
    Connection::fetch(addr, &Request::new("GET", "/")).await;
    assert!(peers.recv().await.is_some());
    assert_eq!(limits.recv().await.unwrap(), Some(Duration::from_secs(21)));
}

// === Setting up ===

async fn unread() -> Unread {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let client = TcpStream::connect(addr).await.unwrap();
    let (stream, addr) = listener.accept().await.unwrap();
    let stream = WatchedStream::new(stream, addr);
    let peer = stream.peer();
    assert_eq!(peer.addr(), client.local_addr().unwrap());
    Unread {
        stream,
        peer,
        client,
    }
}

fn reset(client: TcpStream) {
    SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let make = app.into_make_service_with_connect_info::<Peer>();
    let listener = WatchedListener::new(listener);
    spawn(async move { axum::serve(listener, make).await.unwrap() });
    addr
}

#[allow(
    clippy::disallowed_methods,
    reason = "the server of a test needs a task of its own"
)]
fn spawn(server: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(server);
}

// === impl Deaf ===

impl Deaf {
    async fn serve() -> Self {
        let (hand_out, peers) = mpsc::unbounded_channel();
        let handler = async move |ConnectInfo(peer): ConnectInfo<Peer>, request: AxumRequest| {
            hand_out.send(peer).unwrap();
            std::future::pending::<()>().await;
            drop(request);
        };
        let addr = serve(Router::new().route("/", any(handler))).await;
        let connection = Connection::open(addr).await;
        Self { peers, connection }
    }

    /// Sends a request whose body the server may never read, and waits until its handler runs.
    async fn ask(&mut self, request: &Request) -> Peer {
        self.connection.send(request).await;
        within("the handler", self.peers.recv()).await.unwrap()
    }
}

// === impl Counted ===

impl Counted<()> {
    fn new(peer: Peer) -> Counted<impl Future<Output = ()>> {
        Counted {
            future: Box::pin(async move { peer.gone().await }),
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
