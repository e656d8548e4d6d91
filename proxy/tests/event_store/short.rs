//! Streams that run out of room: which events are dropped first, and which are retained.

use std::time::Duration;

use mcp_cancel_on_disconnect::Outcome;
use mcp_cancel_proxy::event_store::Limits;

use crate::{WITH_PRIMING, scripted::*};

fn log_of(size: usize) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{}"}}}}"#,
        "x".repeat(size)
    )
}

fn large_answer(id: u32, size: usize) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"text":"{}"}}}}"#,
        "x".repeat(size)
    )
}

/// The connection breaks when the client has received no more than the first event.
#[tokio::test(start_paused = true)]
async fn a_server_request_is_not_lost_with_the_connection() {
    let (mut setup, mut client, primed, server) = Setup::primed().await;
    server.message(&request_of(7)).await;
    for count in 0..300 {
        let updated = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"uri":"x:{count}"}}}}"#
        );
        server.message(&updated).await;
        client.read_frame().await;
    }
    server.answer().await;
    assert_eq!(setup.outcome().await, Outcome::Completed);
    drop(client);
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest[0], request_of(7));
    assert_eq!(rest[rest.len() - 1], answer(1));
}

/// Calls fill a session's limit with log lines before an answer arrives.
#[tokio::test(start_paused = true)]
async fn log_events_are_dropped_before_an_answer_of_any_length() {
    for size in [1_000, 20_000] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let mut calls = Vec::new();
        for id in 1..11 {
            let (mut client, server) = setup.call(id).await;
            let primed = client.event().await.unwrap();
            drop(client);
            calls.push((primed, server));
        }
        for (_, server) in &calls {
            for _ in 0..300 {
                server.message(&log_of(1_900)).await;
            }
        }
        settle().await;
        let (primed, server) = calls.remove(0);
        let whole = large_answer(1, size);
        server.message(&whole).await;
        drop(server);
        settle().await;
        let rest = setup.resumed(&primed).await.rest().await;
        let last = rest.last().unwrap();
        assert!(*last == whole, "{size}: {last:.200}");
        assert_eq!(setup.outcome().await, Outcome::Completed);
    }
}

/// The log line fits into `READ_ALLOWANCE`.
#[tokio::test(start_paused = true)]
async fn a_log_event_of_three_kilobytes_is_read_without_room() {
    let limits = Limits {
        session_bytes: 9_200,
        ..Limits::default()
    };
    let (_setup, primed, server) = Setup::detached_with(limits).await;
    server.message(&log_of(3_000)).await;
    settle().await;
    assert!(!server.is_closed(), "the call continues");
    drop(primed);
}

/// The log line is longer than `READ_ALLOWANCE`.
#[tokio::test(start_paused = true)]
async fn a_log_event_without_room_does_not_end_its_call() {
    let limits = Limits {
        session_bytes: 20_000,
        ..Limits::default()
    };
    let (setup, primed, server) = Setup::detached_with(limits).await;
    server.message(&log_of(40_000)).await;
    settle().await;
    assert!(!server.is_closed(), "the call continues");
    server.answer().await;
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest.last(), Some(&answer(1)));
}

/// The client takes part of a log line that is too large to keep, and disconnects.
#[tokio::test(start_paused = true)]
async fn a_log_line_that_loses_its_client_does_not_end_its_call() {
    let (mut setup, mut client, primed, server) = Setup::primed().await;
    let large = log_of(6 << 20);
    let sent = async {
        server.message(&large).await;
        server.message(&answer(1)).await;
    };
    let read_and_disconnect = async {
        client.read_frame().await;
        drop(client);
    };
    tokio::join!(sent, read_and_disconnect);
    drop(server);
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest, [answer(1)]);
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

/// Returns a request from the server that is too large to keep.
fn large_request() -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":9,"method":"sampling/createMessage","params":"{}"}}"#,
        "x".repeat(6 << 20)
    )
}

/// The server sends a large request with an event id, and then cuts the stream.
#[tokio::test(start_paused = true)]
async fn a_stream_that_is_cut_after_a_large_event_is_asked_for_the_rest() {
    let (mut setup, mut client, server) = Setup::called(WITH_PRIMING).await;
    let large = large_request();
    let sent = async {
        server.send(format!("id: up-1\ndata: {large}\n\n")).await;
        server.cut().await;
    };
    let read = async {
        assert_eq!(client.event().await.unwrap().data, "");
        assert!(client.event().await.unwrap().data == large);
    };
    tokio::join!(sent, read);
    let resume = tokio::time::timeout(Duration::from_secs(40), setup.arrived.recv());
    let resume = resume
        .await
        .expect("the server should be asked for the rest")
        .unwrap();
    assert_eq!(resume.headers["last-event-id"], "up-1");
    let server = resume.events();
    server.answer().await;
    assert_eq!(client.rest().await, [answer(1)]);
}

/// The server sends no event ids, so the rest cannot be requested.
#[tokio::test(start_paused = true)]
async fn a_stream_that_is_cut_after_a_large_event_ends_with_an_error() {
    let (_setup, mut client, server) = Setup::called(WITH_PRIMING).await;
    let large = large_request();
    let sent = async {
        server.send(format!("data: {large}\n\n")).await;
        server.cut().await;
    };
    let read = async {
        assert_eq!(client.event().await.unwrap().data, "");
        assert!(client.event().await.unwrap().data == large);
        client.rest().await
    };
    let ((), rest) = tokio::join!(sent, read);
    assert!(
        rest.last()
            .is_some_and(|last| last.contains("ended before its answer")),
        "{rest:?}"
    );
}

/// The server never ends the stream of an answered call.
#[tokio::test(start_paused = true)]
async fn the_stream_of_an_answer_too_large_to_keep_is_closed() {
    let (_setup, mut client, server) = Setup::called(WITH_PRIMING).await;
    let large = large_answer(1, 6 << 20);
    let read = async {
        client.event().await.unwrap();
        client.event().await.unwrap()
    };
    let ((), seen) = tokio::join!(server.message(&large), read);
    assert!(seen.data == large);
    drop(client);
    let closed = tokio::time::timeout(Duration::from_secs(600), server.closed());
    closed
        .await
        .expect("the stream should be closed within ten minutes");
}

#[tokio::test(start_paused = true)]
async fn a_gap_is_counted_once_its_stream_is_removed() {
    let (setup, primed, server) = Setup::detached().await;
    for progress in 0..300 {
        server.progress(progress).await;
    }
    server.answer().await;
    settle().await;
    setup.resumed(&primed).await.rest().await;
    assert_eq!(setup.store.stats().gaps, 0);
    tokio::time::sleep(Duration::from_secs(65)).await;
    assert_eq!(setup.store.stats().gaps, 1);
}

#[tokio::test]
async fn an_event_store_has_room_for_its_maximum_number_of_sessions() {
    let limits = Limits {
        sessions: 5_000,
        bytes: 1 << 30,
        ..Limits::default()
    };
    let store = mcp_cancel_proxy::event_store::EventStore::new(limits);
    for number in 0..5_000 {
        let session = store.begin(&format!("{number:032x}"), Some(WITH_PRIMING));
        let session = session.unwrap_or_else(|| panic!("no room for session {number}"));
        session.open_standalone().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_has_room_for_a_thousand_calls_that_can_be_resumed() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let mut calls = Vec::new();
    for id in 0..1_024 {
        let (mut client, server) = setup.call(id).await;
        let primed = client.event().await.unwrap();
        assert_eq!(primed.data, "", "call {id}");
        drop(client);
        calls.push((primed, server));
    }
    for (id, (primed, server)) in (0..).zip(calls) {
        server.message(&answer(id)).await;
        drop(server);
        assert_eq!(setup.resumed(&primed).await.rest().await, [answer(id)]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_streams_of_cancelled_calls_are_evicted_for_others() {
    let limits = Limits {
        streams: 100,
        bytes: 1_000_000,
        ..Limits::default()
    };
    let mut setup = Setup::started_with(WITH_PRIMING, limits).await;
    for round in 0..5 {
        let started = tokio::time::Instant::now();
        let mut servers = Vec::new();
        for id in 0..100 {
            let (mut client, server) = setup.call(round * 100 + id).await;
            assert_eq!(client.event().await.unwrap().data, "", "{round} {id}");
            drop(client);
            servers.push(server);
        }
        for _ in 0..100 {
            let cancel = setup.next().await;
            assert!(cancel.body.contains("notifications/cancelled"));
            cancel.status(202);
        }
        // Servers need not end the streams of cancelled calls.
        for server in &servers {
            in_time(server.closed()).await;
        }
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_deletes_its_session_gets_errors_and_the_answers_that_exist() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (mut open, _server) = setup.call(1).await;
    let (mut answered, server) = setup.call(2).await;
    server.message(&answer(2)).await;
    drop(server);
    settle().await;
    let delete = http::Request::delete("/mcp").header("mcp-session-id", SESSION);
    let waiting = setup.send(delete.body(axum::body::Body::empty()).unwrap());
    setup.next().await.status(200);
    assert_eq!(in_time(waiting).await.unwrap().status, 200);
    let received = open.rest().await;
    assert_eq!(received.len(), 2, "{received:?}");
    assert!(received[1].contains(r#""id":1,"error""#), "{received:?}");
    assert_eq!(answered.rest().await, ["".to_owned(), answer(2)]);
    drop((open, answered));
    assert_eq!(setup.store.stats().buffer_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_malformed_answer_is_not_followed_by_a_second_one() {
    for line in [
        r#"{"jsonrpc":"2.0","id":"1","result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{},"error":null}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"a":NaN}}"#,
    ] {
        let (mut setup, mut client, server) = Setup::called(WITH_PRIMING).await;
        server.message(line).await;
        drop(server);
        assert_eq!(client.rest().await, ["", line]);
        assert_eq!(setup.outcome().await, Outcome::Completed);
        // The same is true of a slow JSON answer.
        let waiting = setup.post(call(1));
        let arrived = setup.next().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        arrived.json(line);
        assert_eq!(in_time(waiting).await.unwrap().rest().await, ["", line]);
    }
}

/// By then the client has an event stream from the proxy, no part of which can be compressed.
#[tokio::test(start_paused = true)]
async fn a_slow_compressed_answer_ends_its_call_with_an_error_that_has_the_reason() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let response = http::Response::builder()
        .header("content-type", "application/json")
        .header("content-encoding", "gzip");
    arrived.answer(response.body(axum::body::Body::from("x")).unwrap());
    let rest = in_time(waiting).await.unwrap().rest().await;
    assert!(rest[1].contains("is compressed"), "{rest:?}");
}

/// Reads to the end of the stream, which must bring the whole answer.
async fn expect_whole(mut client: Stream, whole: &str) {
    let rest = client.rest().await;
    assert!(
        rest.last().is_some_and(|last| last == whole),
        "the answer is cut off: {} whole events",
        rest.len()
    );
}

/// The client takes a frame every 31 s, which is within the default stall timeout.
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_an_answer_for_longer_than_the_retention_gets_all_of_it() {
    let (_setup, mut client, _primed, server) = Setup::primed().await;
    let whole = large_answer(1, 900_000);
    server.message(&whole).await;
    drop(server);
    for _ in 0..2 {
        client.read_frame().await;
        tokio::time::sleep(Duration::from_secs(31)).await;
    }
    expect_whole(client, &whole).await;
}

/// The client resumes 50 s after its call has ended, and takes more than 10 s to read the answer.
#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_in_time_may_read_past_the_retention() {
    let (setup, client, primed, server) = Setup::primed().await;
    drop(client);
    let whole = large_answer(1, 900_000);
    server.message(&whole).await;
    drop(server);
    tokio::time::sleep(Duration::from_secs(50)).await;
    let mut client = setup.resumed(&primed).await;
    client.read_frame().await;
    tokio::time::sleep(Duration::from_secs(12)).await;
    expect_whole(client, &whole).await;
}

/// The connection breaks after the proxy has written the whole answer to it. The client resumes and reads the answer again, while other
/// answers in its session use up the room.
#[tokio::test(start_paused = true)]
async fn a_stream_that_a_client_is_reading_again_is_not_evicted() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (mut client, server) = setup.call(1).await;
    let primed = client.event().await.unwrap();
    let whole = large_answer(1, 900_000);
    server.message(&whole).await;
    drop(server);
    assert_eq!(client.rest().await.len(), 1);
    drop(client);
    let mut client = setup.resumed(&primed).await;
    client.read_frame().await;
    for id in 2..7 {
        let (mut other, server) = setup.call(id).await;
        other.event().await.unwrap();
        drop(other);
        server.message(&large_answer(id, 900_000)).await;
        drop(server);
        settle().await;
        // There is no room for the last ones.
        while let Ok(cancel) = setup.arrived.try_recv() {
            cancel.status(202);
        }
    }
    expect_whole(client, &whole).await;
}

/// The connection breaks after the proxy has written the whole answer to it. The client resumes in time, is cut off, and resumes again.
#[tokio::test(start_paused = true)]
async fn an_answer_that_is_read_a_second_time_does_not_expire_before_the_next_resume() {
    let (setup, mut client, primed, server) = Setup::primed().await;
    let whole = large_answer(1, 900_000);
    server.message(&whole).await;
    drop(server);
    client.rest().await;
    drop(client);
    tokio::time::sleep(Duration::from_secs(50)).await;
    let mut client = setup.resumed(&primed).await;
    client.read_frame().await;
    drop(client);
    tokio::time::sleep(Duration::from_secs(20)).await;
    expect_whole(setup.resumed(&primed).await, &whole).await;
}
