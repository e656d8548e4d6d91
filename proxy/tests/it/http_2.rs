//! Clients that use HTTP/2: many calls on one connection, some of which are reset or not read.

use std::time::Duration;

use serde_json::Value;
use tokio::{task::yield_now, time};

use crate::support::*;

/// The flow-control window of a client that does not read, which is smaller than two events.
const SMALL_WINDOW: u32 = 64;

/// Returns an event that must not be dropped and that fills a small window.
fn question(id: u32) -> String {
    format!(
        "data: {{\"jsonrpc\":\"2.0\",\"id\":\"q{id}\",\"method\":\"roots/list\",\"params\":{{\"_meta\":{{\"n\":{id}}}}}}}\n\n"
    )
}

/// Accepts a cancellation as the server would, and returns the id that it cancels.
async fn accept_cancel(cancel: ReceivedRequest) -> Value {
    let message: Value = serde_json::from_str(cancel.body()).expect("JSON");
    assert_eq!(message["method"], "notifications/cancelled", "{message}");
    cancel.answer("202 Accepted", "").await;
    message["params"]["requestId"].clone()
}

/// Starts a call, and the server's answer to it.
async fn begin_call(
    upstream: &Upstream,
    connection: &mut H2,
    id: &str,
) -> (H2Stream, ReceivedRequest) {
    let mut stream = connection.send(&session_call(id)).await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    assert_eq!(stream.head().await.status, 200);
    (stream, received)
}

/// Checks that the call is answered, and that no other request reaches the server.
async fn assert_completes(
    upstream: &Upstream,
    mut stream: H2Stream,
    mut received: ReceivedRequest,
    id: u32,
) {
    let answer = format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{}}}}\n\n");
    received.chunk(&answer).await;
    assert!(stream.answer().await.expect("an answer")["result"].is_object());
    assert!(!upstream.has_more().await, "no other cancel");
}

#[tokio::test]
async fn each_call_of_a_connection_that_is_lost_is_cancelled_once_and_no_other() {
    let (upstream, proxy) = Running::start(&["--grace=immediate"]).await;
    let mut lost = H2::open(proxy.addr).await;
    let mut kept = H2::open(proxy.addr).await;
    let (mut streams, mut requests) = (Vec::new(), Vec::new());
    for id in 0..100 {
        let (stream, received) = begin_call(&upstream, &mut lost, &id.to_string()).await;
        streams.push(stream);
        requests.push(received);
    }
    let (other, other_received) = begin_call(&upstream, &mut kept, "100").await;

    lost.hang_up();

    let mut ids = Vec::new();
    for _ in 0..100 {
        ids.push(accept_cancel(upstream.next_request().await).await.as_u64());
    }
    ids.sort_unstable();
    assert!(ids.into_iter().eq((0..100).map(Some)));
    proxy.calls_reach(1).await;
    assert_completes(&upstream, other, other_received, 100).await;
}

#[tokio::test]
async fn a_stream_that_its_client_does_not_read_is_cancelled_when_it_is_reset() {
    let upstream = Upstream::start().await;
    for options in [
        &["--grace=immediate"][..],
        &["--grace=immediate", "--no-resumable"],
    ] {
        let proxy = Running::in_front_of(&upstream, options).await;
        let mut connection = H2::open_with_window(proxy.addr, SMALL_WINDOW).await;
        let (abandoned, mut received) = begin_call(&upstream, &mut connection, "1").await;
        let (other, mut other_received) = begin_call(&upstream, &mut connection, "2").await;
        for id in 0..10 {
            received.chunk(&question(id)).await;
            other_received.chunk(&question(id)).await;
        }

        abandoned.reset();

        assert_eq!(accept_cancel(upstream.next_request().await).await, 1);
        proxy.calls_reach(1).await;
        assert_completes(&upstream, other, other_received, 2).await;
    }
}

#[tokio::test]
async fn a_connection_with_many_calls_has_room_for_a_cancel_of_one() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut connection = H2::open(proxy.addr).await;
    let mut open = Vec::new();
    for id in 0..205 {
        open.push(begin_call(&upstream, &mut connection, &id.to_string()).await);
    }
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}"#;
    let cancel = post(cancel).header("mcp-session-id", "s");
    let mut stream = connection.send(&cancel).await;
    assert_eq!(accept_cancel(upstream.next_request().await).await, 7);
    assert_eq!(stream.head().await.status, 202);
}

/// Returns a frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len())
        .expect("the length fits")
        .to_be_bytes();
    let head = [kind, flags, 0, 0, 0, stream];
    [&length[1..], &head, payload].concat()
}

/// Encodes fields as literals without indexing (RFC 7541, section 6.2.2).
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        let length = u8::try_from(text.len()).expect("the length fits");
        [&[length], text.as_bytes()].concat()
    };
    let field = |(name, value): &(&str, &str)| [vec![0], text(name), text(value)].concat();
    fields.iter().flat_map(field).collect()
}

/// Returns the connection preface (section 3.4) and the head of the first request.
fn opening(flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    let settings = frame(4, 0, 0, &[]);
    let head = frame(1, flags, 1, &block(fields));
    [preface, &settings, &head].concat()
}

/// Returns the header fields of a call in a session.
fn post_fields(authority: &str) -> [(&str, &str); 7] {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", authority),
        (":path", "/mcp"),
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-session-id", "s"),
    ]
}

/// Opens a connection with call 1, which the server has already received.
async fn open_with_call(
    upstream: &Upstream,
    proxy: &Running,
    fields: &[(&str, &str)],
) -> (Connection, ReceivedRequest) {
    let mut client = Connection::open(proxy.addr).await;
    let body = frame(0, 1, 1, call("1").as_bytes());
    client.write(&[opening(4, fields), body].concat()).await;
    let received = upstream.next_request().await;
    (client, received)
}

#[tokio::test]
async fn a_client_that_opens_no_more_streams_gets_the_answers_of_those_it_has() {
    const GOAWAY: u8 = 7;
    let (upstream, proxy) = Running::start(&["--grace=immediate"]).await;
    let authority = proxy.addr.to_string();
    let fields = post_fields(&authority);
    let (mut client, mut received) = open_with_call(&upstream, &proxy, &fields).await;

    client.write(&frame(GOAWAY, 0, 0, &[0; 8])).await;

    received.stream().await;
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received.chunk(&format!("data: {answer}\n\n")).await;
    received.end().await;
    let received_bytes = client.closed().await;
    let received_bytes = String::from_utf8_lossy(&received_bytes);
    assert!(received_bytes.contains(answer), "{received_bytes}");
    proxy.calls_reach(0).await;
    assert!(!upstream.has_more().await, "nothing is cancelled");
}

#[tokio::test]
async fn an_idle_client_does_not_delay_the_shutdown() {
    let (upstream, mut proxy) = Running::start(&["--drain=1h"]).await;
    let authority = proxy.addr.to_string();
    let fields = [
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", &authority),
        (":path", "/mcp"),
    ];
    let mut client = Connection::open(proxy.addr).await;
    client.write(&opening(5, &fields)).await;
    upstream.next_request().await.answer("200 OK", "").await;

    proxy.stop();

    // The client never acknowledges the GOAWAY.
    proxy.ended().await;
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed_and_one_with_a_call_is_not() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut idle = H2::open(proxy.addr).await;
    let mut past = idle.send(&stateless_call("1")).await;
    upstream.next_request().await.answer("200 OK", "{}").await;
    assert_eq!(past.head().await.status, 200);
    past.body_to_end().await;
    let mut busy = H2::open(proxy.addr).await;
    let (mut stream, mut received) = begin_call(&upstream, &mut busy, "2").await;

    time::pause();
    let mut open_for = 0;
    while !idle.is_closed() {
        assert!(open_for < 150, "the connection stays open");
        time::advance(Duration::from_secs(1)).await;
        open_for += 1;
        // Gives the client and the proxy time to exchange their packets.
        for _ in 0..100 {
            yield_now().await;
        }
    }
    time::resume();

    assert!(open_for >= 125, "closed after {open_for} s");
    assert!(!busy.is_closed());
    received
        .chunk("data: {\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{}}\n\n")
        .await;
    assert!(stream.answer().await.expect("an answer")["result"].is_object());
}

/// A reverse proxy sends all of its clients' requests on one connection, and thirty of the clients hang up as soon as they have sent
/// theirs.
#[tokio::test]
async fn requests_that_are_reset_at_once_end_no_other_call_of_the_connection() {
    const RST_STREAM: u8 = 3;
    const CANCEL: [u8; 4] = [0, 0, 0, 8];
    let (upstream, proxy) = Running::start(&["--grace=immediate"]).await;
    let authority = proxy.addr.to_string();
    let fields = post_fields(&authority);
    let (mut client, mut received) = open_with_call(&upstream, &proxy, &fields).await;
    received.stream().await;

    let mut burst = Vec::new();
    for stream in (3..63).step_by(2) {
        burst.extend(frame(1, 4, stream, &block(&fields)));
        burst.extend(frame(RST_STREAM, 0, stream, &CANCEL));
    }
    client.write(&burst).await;
    // If the connection still exists, the proxy has read the burst by the time it forwards another request.
    let body = frame(0, 1, 63, call("2").as_bytes());
    client
        .write(&[frame(1, 4, 63, &block(&fields)), body].concat())
        .await;
    let next = upstream.next_request().await;
    assert!(next.body().contains("tools/call"), "{}", next.body());
    next.answer("200 OK", "{}").await;
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received.chunk(&format!("data: {answer}\n\n")).await;
    received.end().await;
    client.write(&frame(7, 0, 0, &[0; 8])).await;
    let received_bytes = client.closed().await;
    let received_bytes = String::from_utf8_lossy(&received_bytes);
    assert!(received_bytes.contains(answer), "{received_bytes}");
}
