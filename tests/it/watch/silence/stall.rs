//! Clients that are connected and do not read.

use std::time::Duration;

use http_body::Body as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancelReason::ClientDisconnected};
use tokio::time::sleep;

use super::*;
use crate::setup::Lines;

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(10);
const EVENT: &str = "data: 1\n\n";

fn impatient() -> CancelOnDisconnectLayer {
    immediate().0.stall_timeout(LIMIT)
}

/// A stream of which the client has taken one event, and has not asked for the next.
async fn unread(layer: &CancelOnDisconnectLayer) -> (ResponseBody<Body>, Feed, CallToken) {
    let (client, mut server) = between(layer);
    let (response, (feed, token)) = tokio::join!(client.send(call()), server.stream());
    let mut body = response.into_body();
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    (body, feed, token)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_on_is_taken_for_gone() {
    let (mut body, feed, token) = unread(&impatient()).await;
    sleep(LIMIT - SECOND).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());

    sleep(LIMIT).await;

    assert_eq!(token.reason(), Some(ClientDisconnected));
    assert!(feed.is_dropped(), "though hyper still has the body");
    assert_eq!(frame(&mut body).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_stream_is_not_stalled() {
    let (mut body, feed, token) = unread(&impatient()).await;
    assert!(is_silent(&mut body, 100 * LIMIT).await);
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_is_not_stalled() {
    let (mut body, feed, token) = unread(&impatient()).await;
    for _ in 0..100 {
        sleep(LIMIT - SECOND).await;
        feed.write(EVENT);
        assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    }
    assert!(!token.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn without_the_option_a_stream_may_be_left_unread() {
    let (_body, feed, token) = unread(&immediate().0).await;
    sleep(1_000 * LIMIT).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_was_starved_gives_the_client_more_time() {
    let (mut body, feed, token) = unread(&impatient()).await;
    // All at once, as it is for a worker that was blocked.
    tokio::time::advance(3 * LIMIT).await;
    tokio::task::yield_now().await;
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    sleep(3 * LIMIT).await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stood_still_for_a_moment_gives_the_client_as_long() {
    let late = LIMIT + 3 * SECOND / 10;
    let (mut body, feed, token) = unread(&impatient()).await;
    tokio::time::advance(late).await;
    tokio::task::yield_now().await;
    assert!(!token.is_cancelled());
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    sleep(SECOND).await;
    assert!(!token.is_cancelled(), "it reads on");

    let (_body, _feed, token) = unread(&impatient()).await;
    tokio::time::advance(late).await;
    sleep(SECOND).await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_read_to_its_end_is_not_stalled() {
    let (mut body, feed, token) = unread(&impatient()).await;
    feed.write("data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n");
    drop(feed);
    assert!(rest(&mut body).await.ends_with("{}}\n\n"));
    sleep(10 * LIMIT).await;
    assert!(!token.is_cancelled());
    assert!(!body.is_end_stream() || frame(&mut body).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_standalone_stream_that_is_not_read_is_let_go_and_that_is_logged() {
    let lines = Lines::all();
    let (client, mut server) = between(&impatient());
    let get = Request::get("/mcp").body(Body::empty()).expect("a request");
    let (response, (feed, _)) = tokio::join!(client.send(get), server.stream());
    let mut body = response.into_body();
    feed.write(EVENT);
    frame(&mut body).await;
    feed.dropped().await;
    let expected = r#"DEBUG mcp_cancel_on_disconnect: stream let go cause="did not read""#;
    assert_eq!(lines.of_layer(), [expected]);
}

#[tokio::test(start_paused = true)]
async fn a_time_beyond_all_clocks_is_no_limit() {
    let (_body, feed, token) = unread(&immediate().0.stall_timeout(Duration::MAX)).await;
    sleep(1_000 * LIMIT).await;
    assert!(!token.is_cancelled() && !feed.is_dropped());
}
