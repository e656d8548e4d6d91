//! The memory that the event store uses for disconnected clients.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::Stream;
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use mcp_cancel_proxy::event_store::{EventStore, Limits, Resumable};
use tower::{Service, ServiceExt, service_fn};

use crate::{MEMORY, run_alone};

const SESSIONS: usize = 40;
const CALLS: usize = 40;
const BUFFER: usize = 8 << 20;

/// How much memory the test itself may use per call, for its request, client and server.
const TEST_OVERHEAD: usize = 1 << 10;

/// Returns the frames that the server sends for each call, 100 kB in total.
///
/// They are progress, requests and the answer, and their bytes are shared by all streams.
fn frames() -> Vec<Bytes> {
    let event = |json: String| Bytes::from(format!("data: {json}\n\n"));
    let padding = |size| "x".repeat(size);
    let mut frames = Vec::new();
    for number in 0..100 {
        frames.push(event(format!(
            r#"{{"method":"notifications/progress","params":{{"message":"{}"}}}}"#,
            padding(200)
        )));
        if number % 10 == 0 {
            frames.push(event(format!(
                r#"{{"id":{number},"method":"sampling/createMessage","params":"{}"}}"#,
                padding(4_000)
            )));
        }
    }
    frames.push(event(format!(
        r#"{{"id":1,"result":"{}"}}"#,
        padding(40_000)
    )));
    frames
}

#[test]
fn events_for_disconnected_clients_never_exceed_the_buffer() {
    run_alone(check_events);
}

async fn check_events() {
    let frames: Arc<[Bytes]> = frames().into();
    let server = service_fn(move |_: Request<Body>| {
        let body = futures_util::stream::unfold((frames.clone(), 0), async |(frames, at)| {
            tokio::task::yield_now().await;
            let frame = frames.get(at)?.clone();
            Some((Ok::<_, Infallible>(Frame::data(frame)), (frames, at + 1)))
        });
        answer(body)
    });
    let limits = Limits {
        bytes: BUFFER,
        retention: Duration::from_millis(100),
        ..Limits::default()
    };
    let store = EventStore::new(limits);
    let service = Resumable::new(server, store.clone());
    // A first call, because some allocations are there to stay.
    call_and_disconnect(service.clone(), "first").await;
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let mut clients = tokio::task::JoinSet::new();
    for session in 0..SESSIONS {
        let session = session.to_string();
        store.begin(&session, Some("2025-11-25"));
        for _ in 0..CALLS {
            let service = service.clone();
            let session = session.clone();
            clients.spawn(async move { call_and_disconnect(service, &session).await });
        }
    }
    let mut kept = 0;
    while clients.join_next().await.is_some() {
        kept = kept.max(store.stats().buffer_bytes);
        assert!(kept <= BUFFER);
    }
    let peak = MEMORY.peak_usage() - before;
    let allowed = BUFFER + SESSIONS * CALLS * TEST_OVERHEAD;
    println!("at most {kept} bytes counted, {peak} allocated, {allowed} allowed");
    assert!(kept > BUFFER / 2, "the flood was too small: {kept}");
    assert!(peak <= allowed, "{peak} of {allowed}");
    while store.stats().streams > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for session in 0..SESSIONS {
        store.close(&session.to_string());
    }
    store.close("first");
    assert_eq!(store.stats().buffer_bytes, 0);
}

fn answer(
    frames: impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static,
) -> Ready<Result<Response<Body>, Infallible>> {
    let response = Response::builder()
        .header(header::CONTENT_TYPE, "text/event-stream")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap();
    ready(Ok(response))
}

/// Makes a call, reads the first frame and disconnects.
async fn call_and_disconnect<S>(service: S, session: &str)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let request = Request::post("/")
        .header("mcp-session-id", session)
        .body(Body::from(r#"{"id":1,"method":"tools/call"}"#))
        .unwrap();
    let response = service.oneshot(request).await.unwrap();
    let first = response.into_body().frame().await;
    first.expect("an event").expect("no error");
}

#[test]
fn long_event_ids_are_counted() {
    run_alone(check_ids);
}

/// Every stream stays open in the middle of an event, after ids of the maximum length.
async fn check_ids() {
    let id = "x".repeat(512);
    let started =
        format!("id: {id}\ndata: {{\"method\":\"notifications/progress\"}}\n\nid: {id}\nid: {id}");
    let started = Bytes::from(started);
    let server = service_fn(move |_: Request<Body>| {
        let first = futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(started.clone()))]);
        let body = futures_util::StreamExt::chain(first, futures_util::stream::pending());
        answer(body)
    });
    let limits = Limits {
        bytes: BUFFER,
        ..Limits::default()
    };
    let store = EventStore::new(limits);
    let service = Resumable::new(server, store.clone());
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    for session in 0..4 {
        let session = session.to_string();
        store.begin(&session, Some("2025-11-25"));
        for _ in 0..500 {
            call_and_disconnect(service.clone(), &session).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (kept, peak) = (store.stats().buffer_bytes, MEMORY.peak_usage() - before);
    println!(
        "{kept} bytes counted, {peak} allocated, {} streams",
        store.stats().streams
    );
    assert!(kept > BUFFER / 2, "the flood was too small: {kept}");
    assert!(peak <= BUFFER + BUFFER / 4, "{peak} of {BUFFER}");
}
