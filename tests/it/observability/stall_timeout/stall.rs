//! Clients that are connected but do not read.

use std::time::Duration;

use http_body::Body as _;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer,
    CancelReason::{ClientDisconnected, Requested},
};
use tokio::time::sleep;

use super::*;
use crate::setup::Lines;

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(10);
const EVENT: &str = "data: 1\n\n";

fn with_stall_timeout() -> CancelOnDisconnectLayer {
    immediate().0.stall_timeout(LIMIT)
}

/// Returns a stream from which the client has read one event without polling for the next.
async fn unread(layer: &CancelOnDisconnectLayer) -> (ResponseBody<Body>, Feed, CallToken) {
    let (client, mut server) = between(layer);
    let (response, (feed, token)) = tokio::join!(client.send(call()), server.stream());
    let mut body = response.into_body();
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    (body, feed, token)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stops_reading_counts_as_disconnected() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    sleep(LIMIT - SECOND).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());

    sleep(LIMIT).await;

    assert_eq!(token.reason(), Some(ClientDisconnected));
    assert!(feed.is_dropped(), "although hyper still has the body");
    assert_eq!(frame(&mut body).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_stream_is_not_stalled() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    assert!(is_silent(&mut body, 100 * LIMIT).await);
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_is_not_stalled() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    for _ in 0..100 {
        sleep(LIMIT - SECOND).await;
        feed.write(EVENT);
        assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    }
    assert!(!token.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_a_large_event_slowly_is_not_stalled() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    let large = format!("data: {}\n\n", "x".repeat(1024 * 1024));
    feed.write(large.clone());
    feed.write(EVENT);
    let (mut taken, mut frames) = (String::new(), 0);
    while taken.len() < large.len() {
        sleep(LIMIT - SECOND).await;
        taken += &frame(&mut body).await.expect("a piece");
        frames += 1;
    }
    assert_eq!(taken, large);
    assert!(frames > 60, "{frames} pieces of 1 MiB");
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    assert!(!token.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stops_within_a_large_event_counts_as_disconnected() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    feed.write(format!("data: {}\n\n", "x".repeat(1024 * 1024)));
    frame(&mut body).await.expect("a piece");
    sleep(LIMIT + SECOND).await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
    assert_eq!(frame(&mut body).await, None, "no more pieces");
}

#[tokio::test(start_paused = true)]
async fn a_large_event_without_the_option_is_passed_on_whole() {
    let (mut body, feed, _token) = unread(&immediate().0).await;
    let large = format!("data: {}\n\n", "x".repeat(1024 * 1024));
    feed.write(large.clone());
    assert_eq!(frame(&mut body).await, Some(large));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_cancelled_within_a_large_event_ends_after_it() {
    let layer = with_stall_timeout();
    let (mut body, feed, _token) = unread(&layer).await;
    let large = format!("data: {}\n\n", "x".repeat(100_000));
    feed.write(large.clone());
    let first = frame(&mut body).await.expect("a piece");
    for call in layer.calls().snapshot() {
        assert!(layer.calls().cancel(call.info().id(), Requested));
    }
    let rest = rest(&mut body).await;
    let (event, error) = (first + &rest)
        .split_at_checked(large.len())
        .map(|(event, error)| (event.to_owned(), error.to_owned()))
        .expect("the rest of the event");
    assert_eq!(event, large);
    assert!(
        error.starts_with("data: ") && error.contains("-32800"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_zero_is_not_a_limit() {
    let (mut body, feed, token) = unread(&immediate().0.stall_timeout(Duration::ZERO)).await;
    sleep(1_000 * LIMIT).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
}

#[tokio::test(start_paused = true)]
async fn the_least_timeout_does_not_end_a_quiet_stream() {
    let (mut body, feed, token) =
        unread(&immediate().0.stall_timeout(Duration::from_nanos(1))).await;
    assert!(is_silent(&mut body, 100 * LIMIT).await);
    assert!(!token.is_cancelled() && !feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn without_the_option_a_stream_may_stay_unread() {
    let (_body, feed, token) = unread(&immediate().0).await;
    sleep(1_000 * LIMIT).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stalled_gives_the_client_more_time() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    // In a single step, as a blocked worker would see it.
    tokio::time::advance(3 * LIMIT).await;
    tokio::task::yield_now().await;
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    sleep(3 * LIMIT).await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stalled_for_a_moment_gives_the_client_as_long() {
    let late = LIMIT + 3 * SECOND / 10;
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    tokio::time::advance(late).await;
    tokio::task::yield_now().await;
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    sleep(SECOND).await;
    assert!(!token.is_cancelled(), "the client is still reading");

    let (_body, _feed, token) = unread(&with_stall_timeout()).await;
    tokio::time::advance(late).await;
    sleep(SECOND).await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_read_to_its_end_is_not_stalled() {
    let (mut body, feed, token) = unread(&with_stall_timeout()).await;
    feed.write("data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n");
    drop(feed);
    assert!(rest(&mut body).await.ends_with("{}}\n\n"));
    sleep(10 * LIMIT).await;
    assert!(!token.is_cancelled());
    assert!(!body.is_end_stream() || frame(&mut body).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_standalone_stream_that_is_not_read_is_closed_and_that_is_logged() {
    let lines = Lines::all();
    let (client, mut server) = between(&with_stall_timeout());
    let get = Request::get("/mcp").body(Body::empty()).expect("a request");
    let (response, (feed, _)) = tokio::join!(client.send(get), server.stream());
    let mut body = response.into_body();
    feed.write(EVENT);
    frame(&mut body).await;
    feed.dropped().await;
    let expected =
        r#"DEBUG mcp_cancel_on_disconnect: stream closed cause="client stopped reading""#;
    assert_eq!(lines.of_layer(), [expected]);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_that_the_clock_cannot_represent_is_not_a_limit() {
    let (_body, feed, token) = unread(&immediate().0.stall_timeout(Duration::MAX)).await;
    sleep(1_000 * LIMIT).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());
}
