//! Requests that arrive in parts, and inner services that are late, refuse or never end.
//!
//! A table lists each combination's outcome.

use std::{
    convert::Infallible,
    future::Ready,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    response::Response,
};
use futures_util::{FutureExt as _, StreamExt as _, future::join_all, stream};
use http::StatusCode;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, Event, Outcome,
    socket::{Peer, WatchedListener},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Sleep, sleep},
};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

use crate::support::within;

const CALL: &str = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}"#;
const ANSWER: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n";
const DISCONNECTED: Outcome = Outcome::Cancelled(CancelReason::ClientDisconnected);

/// How a client sends its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sends {
    AtOnce,
    AByteAtATime,
    ThenHalfCloses,
    ThenTheNext,
    HalfAndHangsUp,
}

/// What the inner service does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serves {
    Answers,
    /// Becomes ready after 200 ms.
    ReadyLate,
    /// Answers with a status before reading the body.
    RefusesUnread,
    /// Starts a stream before reading the body, which it then reads.
    StreamsUnread,
    /// Writes an event and never ends its stream.
    NeverEnds,
    /// Reads the body and never answers.
    NeverAnswers,
}

/// The call's expected outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Ends(Outcome),
    /// The client gets this status.
    ///
    /// Either no call is known, or it has ended with that answer.
    Refused,
    /// The call runs while its client is connected, and ends when the client disconnects.
    Running,
    /// There has not been a call.
    None,
}

fn expected(sends: Sends, serves: Serves) -> Expected {
    use Expected::{Ends, None, Refused, Running};
    match (sends, serves) {
        // An incomplete message is not a call that could be cancelled.
        (Sends::HalfAndHangsUp, _) => None,
        (_, Serves::RefusesUnread) => Refused,
        // hyper treats a half-close as a disconnect, so a call that has not ended by then is cancelled.
        (Sends::ThenHalfCloses, Serves::NeverEnds | Serves::NeverAnswers) => Ends(DISCONNECTED),
        (_, Serves::NeverEnds | Serves::NeverAnswers) => Running,
        // The call only becomes known after its stream has started, and that stream is passed on unread.
        (_, Serves::StreamsUnread) => Ends(Outcome::Unknown),
        (_, Serves::Answers | Serves::ReadyLate) => Ends(Outcome::Completed),
    }
}

#[tokio::test]
async fn a_request_in_parts_has_the_outcome_of_a_whole_one() {
    use Sends::{AByteAtATime, AtOnce, HalfAndHangsUp, ThenHalfCloses, ThenTheNext};
    use Serves::{Answers, NeverAnswers, NeverEnds, ReadyLate, RefusesUnread, StreamsUnread};
    let all = [
        AtOnce,
        AByteAtATime,
        ThenHalfCloses,
        ThenTheNext,
        HalfAndHangsUp,
    ];
    let served = [
        Answers,
        ReadyLate,
        RefusesUnread,
        StreamsUnread,
        NeverEnds,
        NeverAnswers,
    ];
    let cells = all
        .iter()
        .flat_map(|sends| served.map(|serves| (*sends, serves)));
    // A half-close races with an answer, and either outcome is right.
    let judged = cells.filter(|(sends, serves)| {
        *sends != ThenHalfCloses || matches!(serves, NeverEnds | NeverAnswers)
    });
    join_all(judged.map(|(sends, serves)| play(sends, serves))).await;
}

#[tokio::test]
async fn a_service_that_fails_before_it_is_asked_does_not_make_a_call() {
    let layer = CancelOnDisconnectLayer::new();
    let calls = layer.calls();
    let service = layer.layer(Broken);
    let request = http::Request::post("/mcp")
        .header("content-type", "application/json")
        .body(Body::from(CALL))
        .expect("a request");
    assert_eq!(service.oneshot(request).await.err(), Some("not ready"));
    assert!(calls.is_empty());
}

async fn play(sends: Sends, serves: Serves) {
    let cell = format!("{sends:?}, {serves:?}");
    let (ended, mut ends) = mpsc::unbounded_channel();
    let layer = CancelOnDisconnectLayer::new().observe_fn(move |event| {
        if let Event::Ended { outcome, .. } = event {
            let _the_test_is_over = ended.send(*outcome);
        }
    });
    let calls = layer.calls();
    let addr = serve(layer, serves).await;
    let mut client = TcpStream::connect(addr).await.expect("connect");
    client.set_nodelay(true).expect("TCP_NODELAY");
    sends.send(&mut client).await;
    match expected(sends, serves) {
        Expected::Ends(outcome) => {
            let ended = within(&cell, ends.recv()).await;
            assert_eq!(ended, Some(outcome), "{cell}");
        }
        Expected::Refused => {
            let mut status = [0; 12];
            within(&cell, client.read_exact(&mut status))
                .await
                .expect("a status");
            assert_eq!(&status, b"HTTP/1.1 403", "{cell}");
        }
        Expected::Running => {
            sleep(Duration::from_millis(300)).await;
            assert!(ends.try_recv().is_err(), "{cell}: ended");
            assert_eq!(calls.len(), 1, "{cell}");
            drop(client);
            let ended = within(&cell, ends.recv()).await;
            assert_eq!(ended, Some(DISCONNECTED), "{cell}");
        }
        Expected::None => {
            drop(client);
            sleep(Duration::from_millis(300)).await;
            assert!(calls.is_empty() && ends.try_recv().is_err(), "{cell}");
        }
    }
}

// === impl Sends ===

impl Sends {
    async fn send(self, client: &mut TcpStream) {
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\naccept: application/json, text/event-stream\r\n\
             mcp-protocol-version: 2026-07-28\r\ncontent-length: {}\r\n\r\n",
            CALL.len()
        );
        let whole = head.clone() + CALL;
        let bytes = match self {
            Self::AtOnce | Self::ThenHalfCloses | Self::AByteAtATime => whole,
            Self::ThenTheNext => whole + "GET /next HTTP/1.1\r\nhost: a\r\n\r\n",
            Self::HalfAndHangsUp => head + &CALL[..CALL.len() / 2],
        };
        match self {
            Self::AByteAtATime => {
                for byte in bytes.as_bytes() {
                    if client.write_all(&[*byte]).await.is_err() {
                        // The request was refused before it had been sent in full.
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            _ => client.write_all(bytes.as_bytes()).await.expect("write"),
        }
        if self == Self::ThenHalfCloses {
            client.shutdown().await.expect("half-close");
        }
    }
}

// === Server ===

/// A service that is never ready.
#[derive(Clone)]
struct Broken;

impl<R> Service<R> for Broken {
    type Response = Response;
    type Error = &'static str;
    type Future = Ready<Result<Response, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Err("not ready"))
    }

    fn call(&mut self, _: R) -> Self::Future {
        unreachable!("the service was never ready")
    }
}

/// A service that is late to become ready for each request.
struct Late<S> {
    inner: S,
    sleep: Pin<Box<Sleep>>,
}

impl<S: Clone> Clone for Late<S> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone())
    }
}

impl<S> Late<S> {
    fn new(inner: S) -> Self {
        let sleep = Box::pin(sleep(Duration::from_millis(200)));
        Self { inner, sleep }
    }
}

impl<R, S: Service<R>> Service<R> for Late<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        ready!(self.sleep.poll_unpin(cx));
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.inner.call(request)
    }
}

async fn serve(layer: CancelOnDisconnectLayer, serves: Serves) -> SocketAddr {
    let inner = service_fn(move |request: Request| answer(serves, request));
    let app = match serves {
        Serves::ReadyLate => Router::new().fallback_service(Late::new(inner)),
        _ => Router::new().fallback_service(inner),
    };
    let app = app.layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("bound");
    let app = app.into_make_service_with_connect_info::<Peer>();
    let server = axum::serve(WatchedListener::new(listener), app);
    #[allow(clippy::disallowed_methods, reason = "the test needs its own server")]
    let _serving = tokio::spawn(async move { server.await });
    addr
}

async fn answer(serves: Serves, request: Request) -> Result<Response, Infallible> {
    let body = request.into_body();
    let events = |body| {
        let response = Response::builder().header("content-type", "text/event-stream");
        response.body(body).expect("a response")
    };
    Ok(match serves {
        Serves::RefusesUnread => {
            let mut refusal = Response::new(Body::from("no"));
            *refusal.status_mut() = StatusCode::FORBIDDEN;
            refusal
        }
        Serves::StreamsUnread => {
            let late = stream::once(async move {
                let whole = to_bytes(body, CALL.len()).await;
                whole.map(|_| ANSWER.to_owned())
            });
            events(Body::from_stream(late))
        }
        Serves::Answers | Serves::ReadyLate => {
            let _read = to_bytes(body, CALL.len()).await;
            events(Body::from(ANSWER))
        }
        Serves::NeverEnds => {
            let _read = to_bytes(body, CALL.len()).await;
            let first = stream::once(async { Ok::<_, Infallible>("data: 1\n\n") });
            events(Body::from_stream(first.chain(stream::pending())))
        }
        Serves::NeverAnswers => {
            let _read = to_bytes(body, CALL.len()).await;
            std::future::pending().await
        }
    })
}
