//! A drain ends all streams on which no more events will be sent.
//!
//! The outcomes of their calls do not matter.

use mcp_cancel_on_disconnect::{
    CancelReason::{self, ClientDisconnected, ShuttingDown},
    Limits, Outcome,
};
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::log::{Happened, number};

const SECOND: Duration = Duration::from_secs(1);
const EVENT: &str = "id: 1/7\ndata:\n\n";
const ANSWER: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n";

/// Returns a layer whose calls wait for their clients, and its log.
fn with_grace() -> (CancelOnDisconnectLayer, Log) {
    Log::of(CancelOnDisconnectLayer::new().grace(Grace::Never))
}

/// Starts a client and a server with such a layer between them.
fn started() -> (CancelOnDisconnectLayer, Log, Client, Server) {
    let (layer, log) = with_grace();
    let (client, server) = between(&layer);
    (layer, log, client, server)
}

fn in_session(mut request: Request<Body>) -> Request<Body> {
    let session = http::HeaderValue::from_static("the-session");
    request.headers_mut().insert("mcp-session-id", session);
    request
}

fn task() -> Request<Body> {
    let params = json!({ "name": "a", "task": { "ttl": 60_000 } });
    let call = json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params });
    in_session(post(&call))
}

fn cancelled() -> Request<Body> {
    let method = "notifications/cancelled";
    let params = json!({ "requestId": 7 });
    in_session(post(
        &json!({ "jsonrpc": "2.0", "method": method, "params": params }),
    ))
}

fn resume() -> Request<Body> {
    let get = Request::get("/mcp").header("last-event-id", "1/7");
    in_session(get.body(Body::empty()).expect("a request"))
}

fn delete() -> Request<Body> {
    let delete = Request::delete("/mcp").body(Body::empty());
    in_session(delete.expect("a request"))
}

/// Opens a stream and reads its first event.
async fn open(
    client: &Client,
    server: &mut Server,
    request: Request<Body>,
) -> (ResponseBody<Body>, Feed, CallToken) {
    let (response, (feed, token)) = tokio::join!(client.send(request), server.stream());
    let mut body = response.into_body();
    feed.write(EVENT);
    assert_eq!(frame(&mut body).await.as_deref(), Some(EVENT));
    (body, feed, token)
}

/// Sends a request that the server accepts without a stream.
async fn send_accepted(client: &Client, server: &mut Server, request: Request<Body>) {
    let (response, ()) = tokio::join!(client.send(request), accept_next(server));
    assert_eq!(response.status(), 202);
}

/// Asserts that a body is open and has nothing to read for a second.
async fn assert_open(body: &mut ResponseBody<Body>) {
    assert!(is_silent(body, SECOND).await);
}

async fn assert_ends(body: &mut ResponseBody<Body>, feed: &Feed) {
    assert_eq!(timeout(SECOND, rest(body)).await.as_deref(), Ok(""));
    assert!(feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_stays_open_after_its_answer_ends_with_the_drain() {
    for request in [call(), in_session(call())] {
        let (layer, log, client, mut server) = started();
        let (mut body, feed, _) = open(&client, &mut server, request).await;
        feed.write(ANSWER);
        assert_eq!(frame(&mut body).await.as_deref(), Some(ANSWER));
        assert_open(&mut body).await;

        let report = layer.calls().drain(SECOND).await;

        assert_ends(&mut body, &feed).await;
        assert_eq!((report.ended, report.cancelled), (0, 0));
        assert_eq!(log.ends(&number(7)), [Outcome::Completed]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_stays_open_after_an_answer_that_follows_the_drain_ends_as_well() {
    let (layer, _log, client, mut server) = started();
    let (mut body, feed, _) = open(&client, &mut server, task()).await;
    feed.write(ANSWER);
    layer.calls().drain(SECOND).await;
    assert_ends(&mut body, &feed).await;
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_call_whose_id_was_used_again_ends_with_the_drain() {
    let (layer, log, client, mut server) = started();
    let (mut older, older_feed, older_token) = open(&client, &mut server, in_session(call())).await;
    let (mut newer, newer_feed, _) = open(&client, &mut server, in_session(call())).await;
    assert_open(&mut older).await;
    assert_eq!(log.ends(&number(7)), [Outcome::Unknown]);

    let calls = layer.calls();
    let (report, ()) = tokio::join!(calls.drain(SECOND), accept_next(&mut server));

    assert_eq!(report.cancelled, 1);
    assert_ends(&mut older, &older_feed).await;
    assert!(!older_token.is_cancelled());
    assert!(rest(&mut newer).await.contains("-32800"));
    assert!(newer_feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_task_ends_with_the_drain_and_the_task_continues() {
    let (layer, log, client, mut server) = started();
    let (mut body, feed, token) = open(&client, &mut server, task()).await;
    assert_open(&mut body).await;

    let report = layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
    assert_eq!(report.cancelled, 0);
    assert!(!token.is_cancelled());
    assert_eq!(log.cancelled(), []);
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_call_that_its_client_cancelled_ends_with_the_drain() {
    let (layer, log, client, mut server) = started();
    let (mut body, feed, token) = open(&client, &mut server, in_session(call())).await;
    assert_open(&mut body).await;
    send_accepted(&client, &mut server, cancelled()).await;
    assert!(token.is_cancelled());
    assert_eq!(log.ends(&number(7)), [Outcome::ClientCancelled]);
    assert_open(&mut body).await;

    layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
}

/// hyper does not poll the stream again until it is woken.
#[tokio::test(start_paused = true)]
async fn a_stream_that_is_not_polled_again_is_woken_by_the_drain() {
    let (layer, _log, client, mut server) = started();
    let (mut body, feed, _) = open(&client, &mut server, in_session(call())).await;
    let ends = async { timeout(10 * SECOND, rest(&mut body)).await };
    let drained = async {
        sleep(SECOND).await;
        send_accepted(&client, &mut server, cancelled()).await;
        layer.calls().drain(SECOND).await;
    };
    let (rest, ()) = tokio::join!(ends, drained);
    assert_eq!(rest.as_deref(), Ok(""));
    assert!(feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn the_streams_of_a_session_that_was_deleted_end_with_the_drain() {
    let (layer, _log, client, mut server) = started();
    let (mut body, feed, _) = open(&client, &mut server, in_session(call())).await;
    assert_open(&mut body).await;
    send_accepted(&client, &mut server, delete()).await;

    layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
}

#[tokio::test(start_paused = true)]
async fn all_streams_of_a_call_that_was_resumed_end_with_the_drain() {
    let (layer, log, client, mut server) = started();
    let (mut first, first_feed, _) = open(&client, &mut server, in_session(call())).await;
    assert_open(&mut first).await;
    let (mut second, second_feed, _) = open(&client, &mut server, resume()).await;
    second_feed.write(ANSWER);
    assert_eq!(frame(&mut second).await.as_deref(), Some(ANSWER));
    assert_eq!(log.ends(&number(7)), [Outcome::Completed]);
    assert_open(&mut second).await;

    layer.calls().drain(SECOND).await;

    assert_ends(&mut first, &first_feed).await;
    assert_ends(&mut second, &second_feed).await;
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_call_beyond_a_limit_ends_with_the_drain() {
    let (layer, _log) = with_grace();
    let layer = layer.limits(Limits::default().calls(0));
    let (client, mut server) = between(&layer);
    let (mut body, feed, _) = open(&client, &mut server, in_session(call())).await;
    assert!(layer.calls().is_empty());

    layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
}

#[tokio::test(start_paused = true)]
async fn an_encoded_stream_ends_with_the_drain() {
    let (layer, _log, client, mut server) = started();
    let answer = async {
        let (feed, body) = Feed::new();
        let mut response = events(body);
        let encoding = http::HeaderValue::from_static("gzip");
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_ENCODING, encoding);
        server.next_request().await.answer(response);
        feed
    };
    let (response, feed) = tokio::join!(client.send(in_session(call())), answer);
    let mut body = response.into_body();
    send_accepted(&client, &mut server, cancelled()).await;

    layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_was_committed_and_stays_open_after_its_answer_ends_with_the_drain() {
    let layer = with_grace().0.commit_after(SECOND);
    let (client, mut server) = between(&layer);
    let request = in_session(call());
    let (response, next_request) = tokio::join!(client.send(request), server.next_request());
    let mut body = response.into_body();
    assert_open(&mut body).await;
    let (feed, answer) = Feed::new();
    next_request.answer(events(answer));
    feed.write(ANSWER);
    assert_eq!(frame(&mut body).await.as_deref(), Some(ANSWER));
    assert_open(&mut body).await;

    layer.calls().drain(SECOND).await;

    assert_ends(&mut body, &feed).await;
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_task_that_opens_after_the_drain_ends_at_once() {
    let (layer, log, client, mut server) = started();
    let answered = async {
        let next_request = server.next_request().await;
        layer.calls().drain(SECOND).await;
        let (feed, body) = Feed::new();
        next_request.answer(events(body));
        feed
    };
    let (response, feed) = tokio::join!(client.send(task()), answered);
    assert_ends(&mut response.into_body(), &feed).await;
    assert_eq!(log.cancelled(), []);
}

#[tokio::test(start_paused = true)]
async fn two_drains_end_when_the_first_has_ended_the_calls() {
    let (layer, log, client, mut server) = started();
    let (mut answered, feed, _) = open(&client, &mut server, in_session(call())).await;
    let (mut body, _feed, _) = open(&client, &mut server, call()).await;
    let calls = layer.calls();
    let started = Instant::now();
    let answer = async {
        sleep(SECOND).await;
        feed.write(ANSWER);
        frame(&mut answered).await
    };

    let with_grace = timeout(100 * SECOND, calls.drain(Duration::MAX));
    let (first, second, _) = tokio::join!(calls.drain(3 * SECOND), with_grace, answer);

    let second = second.expect("the second drain does not wait for calls that have ended");
    assert_eq!(started.elapsed().as_secs(), 3);
    assert_eq!((first.ended, first.cancelled), (1, 1));
    assert_eq!((second.ended, second.cancelled), (1, 0));
    assert!(rest(&mut body).await.contains("-32800"));
    let ends = [Outcome::Completed, Outcome::Cancelled(ShuttingDown)];
    assert_eq!(log.ends(&number(7)), ends);
}

#[tokio::test(start_paused = true)]
async fn a_drain_after_a_drain_waits_for_the_tasks_that_went_on() {
    let (layer, _log, client, mut server) = started();
    let (_body, _feed, _) = open(&client, &mut server, task()).await;
    let calls = layer.calls();
    calls.drain(SECOND).await;
    let started = Instant::now();
    let cancel = async {
        sleep(3 * SECOND).await;
        send_accepted(&client, &mut server, cancelled()).await;
    };
    let (report, ()) = tokio::join!(calls.drain(100 * SECOND), cancel);
    assert_eq!(
        started.elapsed().as_secs(),
        3,
        "the drain waits for the task"
    );
    assert_eq!(
        (report.ended, report.cancelled),
        (0, 0),
        "the client has ended its task"
    );
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_is_dropped_while_it_waits_has_ended_nothing() {
    let (layer, log) = immediate();
    let (client, mut server) = between(&layer);
    let (mut body, feed, token) = open(&client, &mut server, call()).await;
    let calls = layer.calls();
    assert!(timeout(SECOND, calls.drain(10 * SECOND)).await.is_err());

    assert_open(&mut body).await;
    let (other, other_feed, _) = open(&client, &mut server, call()).await;
    drop(other);
    other_feed.dropped().await;
    assert_eq!(log.cancelled(), [(number(7), ClientDisconnected)]);
    assert!(!token.is_cancelled());

    assert_eq!(calls.drain(SECOND).await.cancelled, 1);
    assert!(rest(&mut body).await.contains("-32800"));
    assert!(feed.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_accept_its_cancels_delays_a_drain_for_a_second() {
    let (layer, log, client, mut server) = started();
    let (mut body, _feed, _) = open(&client, &mut server, in_session(call())).await;
    let started = Instant::now();

    let report = layer.calls().drain(SECOND).await;

    assert_eq!(started.elapsed().as_secs(), 2);
    assert_eq!(report.cancelled, 1);
    assert!(rest(&mut body).await.contains("-32800"));
    let failed = |event: &Happened| matches!(event, Happened::CancelFailed(..));
    assert!(
        !log.events().iter().any(failed),
        "the server may still accept the cancel"
    );
    sleep(10 * SECOND).await;
    assert!(log.events().iter().any(failed));
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_is_dropped_at_its_end_has_still_notified_the_servers() {
    let (layer, log, client, mut server) = started();
    let (_body, _feed, _) = open(&client, &mut server, in_session(call())).await;
    let calls = layer.calls();
    let dropped = timeout(SECOND + SECOND / 2, calls.drain(SECOND)).await;
    assert!(dropped.is_err());

    accept_next(&mut server).await;

    sleep(20 * SECOND).await;
    let failed = |event: &Happened| matches!(event, Happened::CancelFailed(..));
    assert!(!log.events().iter().any(failed));
}

/// Accepts the next request.
async fn accept_next(server: &mut Server) {
    let mut accepted = Response::new(Body::empty());
    *accepted.status_mut() = http::StatusCode::ACCEPTED;
    server.next_request().await.answer(accepted);
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_count_a_call_as_ended_that_was_cancelled_meanwhile() {
    let (layer, _log) = immediate();
    let (client, mut server) = between(&layer);
    let calls = layer.calls();
    let (_cancelled, _feed, _) = open(&client, &mut server, call()).await;
    let id = calls.snapshot()[0].info().id();
    let (mut ends, answering, _) = open(&client, &mut server, call()).await;
    let (left, _feed, _) = open(&client, &mut server, call()).await;
    let happens = async {
        sleep(SECOND).await;
        assert!(calls.cancel(id, CancelReason::Requested));
        drop(left);
        answering.write(ANSWER);
        drop(answering);
        rest(&mut ends).await
    };
    let (report, _) = tokio::join!(calls.drain(60 * SECOND), happens);
    assert_eq!((report.ended, report.cancelled), (1, 0));
}
