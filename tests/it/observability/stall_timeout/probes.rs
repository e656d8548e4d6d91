//! Comments in silent streams.

use std::time::Duration;

use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use tokio::time::Instant;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const EVENT: &str = "data: 1\n\n";

fn probing() -> CancelOnDisconnectLayer {
    immediate().0.keep_alive(5 * SECOND)
}

/// Returns a response whose stream the test writes.
async fn stream(layer: &CancelOnDisconnectLayer) -> (Response<ResponseBody<Body>>, Feed) {
    let (client, mut server) = between(layer);
    let (response, (feed, _)) = tokio::join!(client.send(call()), server.stream());
    (response, feed)
}

#[tokio::test(start_paused = true)]
async fn a_quiet_stream_is_probed_at_every_interval() {
    let (mut response, _feed) = stream(&probing()).await;
    let started = Instant::now();
    for nth in 1..=3 {
        let probe = frame(response.body_mut()).await;
        assert_eq!(probe.as_deref(), Some(PROBE));
        assert_eq!(started.elapsed().as_secs(), 5 * nth);
    }
}

#[tokio::test(start_paused = true)]
async fn traffic_postpones_the_next_probe() {
    let (mut response, feed) = stream(&probing()).await;
    let body = response.body_mut();
    for _ in 0..3 {
        assert!(is_silent(body, 4 * SECOND).await);
        feed.write(EVENT);
        assert_eq!(frame(body).await.as_deref(), Some(EVENT));
    }
    let quiet = Instant::now();
    assert_eq!(frame(body).await.as_deref(), Some(PROBE));
    assert_eq!(quiet.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_comment_of_the_server_counts_as_traffic() {
    let (mut response, feed) = stream(&probing()).await;
    let body = response.body_mut();
    assert!(is_silent(body, 4 * SECOND).await);
    feed.write(": mine\n\n");
    assert_eq!(frame(body).await.as_deref(), Some(": mine\n\n"));
    assert!(is_silent(body, 4 * SECOND).await);
    assert_eq!(frame(body).await.as_deref(), Some(PROBE));
}

#[tokio::test(start_paused = true)]
async fn no_probe_is_sent_inside_an_event() {
    let (mut response, feed) = stream(&probing()).await;
    let body = response.body_mut();
    for half in ["data: 1", "\n", "id: 1\n"] {
        feed.write(half);
        assert_eq!(frame(body).await.as_deref(), Some(half));
        assert!(is_silent(body, 60 * SECOND).await, "after {half:?}");
    }
    feed.write("\n");
    assert_eq!(frame(body).await.as_deref(), Some("\n"));
    assert_eq!(frame(body).await.as_deref(), Some(PROBE));
}

#[tokio::test(start_paused = true)]
async fn a_byte_order_mark_after_a_probe_is_removed() {
    let (mut response, feed) = stream(&probing()).await;
    let body = response.body_mut();
    assert_eq!(frame(body).await.as_deref(), Some(PROBE));
    feed.write("\u{feff}data: 1\n\n");
    assert_eq!(frame(body).await.as_deref(), Some(EVENT));
}

#[tokio::test(start_paused = true)]
async fn without_the_option_nothing_is_injected() {
    let (mut response, _feed) = stream(&immediate().0).await;
    assert!(is_silent(response.body_mut(), 3600 * SECOND).await);
    assert_eq!(response.headers().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_standalone_stream_is_probed_as_well() {
    let (client, mut server) = between(&probing());
    let get = Request::get("/mcp").body(Body::empty()).expect("a request");
    let (mut response, (_feed, _)) = tokio::join!(client.send(get), server.stream());
    assert_eq!(frame(response.body_mut()).await.as_deref(), Some(PROBE));
}

#[tokio::test(start_paused = true)]
async fn only_plain_event_streams_are_probed() {
    let encoded = |body| {
        let mut response = events(body);
        let gzip = header::HeaderValue::from_static("gzip");
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, gzip);
        response
    };
    let sized = |body| {
        let mut response = events(body);
        let length = header::HeaderValue::from_static("9");
        response
            .headers_mut()
            .insert(header::CONTENT_LENGTH, length);
        response
    };
    let json = |body| typed("application/json", body);
    for answer in [&encoded as &dyn Fn(Body) -> _, &sized, &json] {
        let (client, mut server) = between(&probing());
        let (_feed, body) = Feed::new();
        let (mut response, ()) = tokio::join!(client.send(call()), async {
            server.next_request().await.answer(answer(body));
        });
        let before = response.headers().clone();
        assert!(
            is_silent(response.body_mut(), 60 * SECOND).await,
            "{before:?}"
        );
        assert!(!before.contains_key("x-accel-buffering"));
    }
}

#[tokio::test(start_paused = true)]
async fn headers_against_buffering_are_added_where_they_are_missing() {
    let (response, _feed) = stream(&probing()).await;
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    assert_eq!(response.headers()["cache-control"], "no-cache");

    let (client, mut server) = between(&probing());
    let (_feed, body) = Feed::new();
    let (response, ()) = tokio::join!(client.send(call()), async {
        let mut response = events(body);
        let its_own = header::HeaderValue::from_static("no-store");
        response
            .headers_mut()
            .insert(header::CACHE_CONTROL, its_own);
        server.next_request().await.answer(response);
    });
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
}

#[tokio::test(start_paused = true)]
async fn an_interval_of_zero_does_not_flood_the_client() {
    let (mut response, _feed) = stream(&immediate().0.keep_alive(Duration::ZERO)).await;
    let started = Instant::now();
    for _ in 0..100 {
        frame(response.body_mut()).await;
    }
    assert!(started.elapsed() >= Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn an_interval_that_the_clock_cannot_represent_disables_probes() {
    let (mut response, _feed) = stream(&immediate().0.keep_alive(Duration::MAX)).await;
    assert!(is_silent(response.body_mut(), 3600 * SECOND).await);
}

/// Nothing can be timed without a runtime, but nothing breaks either.
#[test]
fn without_a_runtime_all_options_are_without_effect() {
    use futures_util::FutureExt as _;
    let layer = immediate().0.keep_alive(SECOND).commit_after(SECOND);
    let layer = layer.stall_timeout(SECOND).call_timeout(SECOND);
    let (client, mut server) = between(&layer);
    let mut sent = Box::pin(client.send(call()));
    assert!(sent.as_mut().now_or_never().is_none());
    let next_request = server
        .next_request()
        .now_or_never()
        .expect("a request from the layer");
    let (feed, body) = Feed::new();
    next_request.answer(events(body));
    let mut response = sent.now_or_never().expect("the request has been answered");
    feed.write(EVENT);
    let event = frame(response.body_mut()).now_or_never();
    assert_eq!(event.flatten().as_deref(), Some(EVENT));
}
