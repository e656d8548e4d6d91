//! Any stream from a server behind the proxy's event store, in any frames. The client disconnects and resumes at any
//! time. All in all it must read exactly what an independent parser reads, once and in order.

#![no_main]

use std::{convert::Infallible, future::Ready, pin::pin, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use fuzz::{choices::Choices, clock, frames, parsers::by_sseer};
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use libfuzzer_sys::fuzz_target;
use mcp_cancel_proxy::event_store::{EventStore, Limits, Resumable};
use tokio::time::{sleep, timeout};
use tower_service::Service as _;

const SESSION: &str = "s";

/// How long the server pauses between two frames.
const INTERVAL: Duration = Duration::from_secs(1);

/// Longer than the server's longest stream.
const END: Duration = Duration::from_secs(100_000);

/// The events that a client has read so far.
#[derive(Default)]
struct Client {
    data: Vec<String>,
    last: Option<String>,
    /// The current response's frames.
    frames: Vec<Bytes>,
}

/// Answers every call with these frames.
#[derive(Clone)]
struct Server {
    frames: Vec<Bytes>,
    is_cut: bool,
}

fuzz_target!(|bytes: &[u8]| {
    let Some((decisions, rest)) = bytes.split_first() else {
        return;
    };
    let (decisions, text) = rest.split_at(usize::from(*decisions).min(rest.len()));
    let mut choices = Choices::new(decisions);
    // In this revision, the stream is primed with an event id.
    let primed = choices.coin();
    let server = Server {
        is_cut: choices.coin(),
        frames: frames::cut(text, &mut choices),
    };
    let Some(expected) = expected(&server.frames) else {
        return;
    };
    if expected.len() > Limits::default().events / 2 {
        return;
    }
    clock::run(run(server, primed, expected, choices));
});

async fn run(server: Server, primed: bool, expected: Vec<String>, mut choices: Choices<'_>) {
    let store = EventStore::new(Limits::default());
    let revision = if primed { "2025-11-25" } else { "2025-06-18" };
    store
        .begin(SESSION, Some(revision))
        .expect("room for a session");
    let empty = store.stats().buffer_bytes;
    let mut service = Resumable::new(server, store.clone());
    let call = Request::post("/")
        .header("mcp-session-id", SESSION)
        .body(Body::from(r#"{"jsonrpc":"2.0","id":"call","method":"a"}"#))
        .expect("a request");
    let mut body = service.call(call).await.expect("an answer").into_body();
    let mut client = Client::default();
    loop {
        // How many frames the client reads before it disconnects.
        let stays = match choices.byte() {
            0 => usize::MAX,
            count => usize::from(count),
        };
        let ended = client.read(&mut pin!(&mut body), stays).await;
        client.judge();
        let Some(last) = client.last.clone().filter(|_| !ended) else {
            break;
        };
        drop(body);
        sleep(INTERVAL * u32::from(choices.one_of(8))).await;
        let resume = Request::get("/")
            .header("mcp-session-id", SESSION)
            .header("last-event-id", last)
            .body(Body::empty())
            .expect("a request");
        let response = service.call(resume).await.expect("an answer");
        assert_eq!(
            response.status(),
            200,
            "it is kept while its client may resume"
        );
        body = response.into_body();
    }
    client.data.retain(|data| !data.is_empty());
    // A client that disconnects before its first event id has nothing to resume from.
    let received = client.data.len().min(expected.len());
    assert_eq!(client.data[..received], expected[..received]);
    if !client.frames.is_empty() || client.last.is_some() {
        // The proxy may append an error of its own.
        let more = &client.data[received..];
        assert!(
            more.len() <= 1
                && more
                    .iter()
                    .all(|data| data.contains(r#""id":"call","error""#)),
            "{more:?}"
        );
    }
    // The frames that the client holds count as retained.
    drop((client, body));
    sleep(END).await;
    assert_eq!(
        (store.stats().streams, store.stats().buffer_bytes),
        (0, empty),
        "nothing is left"
    );
}

/// The messages that a parser finds in the stream, or `None` if the parser rejects it. It may do that because, unlike
/// the parser, the event store does not validate UTF-8.
fn expected(frames: &[Bytes]) -> Option<Vec<String>> {
    let (events, failed) = by_sseer(frames);
    let data = events.into_iter().map(|event| event.data.to_string());
    // Line feeds in a message are between its tokens. An event made of line feeds alone has no message.
    let messages = data.filter(|data| data.bytes().any(|byte| byte != b'\n'));
    (!failed).then(|| messages.collect())
}

// === impl Client ===

impl Client {
    /// Reads `stays` frames. Returns `true` if the stream has ended.
    async fn read(
        &mut self,
        body: &mut (impl http_body::Body<Data = Bytes, Error = axum::Error> + Unpin),
        mut stays: usize,
    ) -> bool {
        self.frames.clear();
        while stays > 0 {
            stays -= 1;
            let frame = timeout(END, body.frame())
                .await
                .expect("a stream that ends");
            let Some(frame) = frame else {
                return true;
            };
            let frame = frame.expect("a body that does not fail");
            self.frames.extend(frame.into_data());
        }
        false
    }

    /// Parses the frames read so far and records their events.
    fn judge(&mut self) {
        let (events, failed) = by_sseer(&self.frames);
        assert!(!failed, "{:?}", self.frames);
        for event in events {
            let id = event.id.to_string();
            assert!(id.starts_with("mcp-"), "{id}");
            self.last = Some(id);
            self.data.push(event.data.to_string());
        }
    }
}

// === impl Server ===

impl tower_service::Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method() != http::Method::POST {
            // The server has no event store of its own, even though its stream may have ids.
            let refusal = Response::builder().status(405).body(Body::empty());
            return std::future::ready(Ok(refusal.expect("a response")));
        }
        let frames = self
            .frames
            .clone()
            .into_iter()
            .map(|frame| Ok(Frame::data(frame)));
        let end = self.is_cut.then(|| Err(std::io::Error::other("cut")));
        let frames = stream::unfold(frames.chain(end), async |mut frames| {
            sleep(INTERVAL).await;
            Some((frames.next()?, frames))
        });
        let response = Response::builder()
            .header(header::CONTENT_TYPE, "text/event-stream")
            .body(Body::new(StreamBody::new(frames)));
        std::future::ready(Ok(response.expect("a response")))
    }
}
