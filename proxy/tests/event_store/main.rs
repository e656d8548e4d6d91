//! The event store between a server controlled by the test and the layer that cancels.

#![allow(
    clippy::restriction,
    reason = "a failed expectation ends the test; clippy only spares functions marked #[test]"
)]

mod clients;
mod scripted;
mod short;

use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, Request, Response, header};
use http_body_util::StreamBody;
use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use mcp_cancel_proxy::event_store::{Call, Event as StoreEvent, EventStore, Limits, Session};

use self::scripted::*;

/// A revision whose clients do not support priming events.
const WITHOUT_PRIMING: &str = "2025-06-18";

/// Longer than the grace period of a call whose client can resume.
const AFTER_GRACE: Duration = Duration::from_secs(60);

const DISCONNECTED: Outcome = Outcome::Cancelled(CancelReason::ClientDisconnected);

#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_in_time_gets_every_event_once_and_in_order() {
    let (mut setup, mut client, server) = Setup::called(WITHOUT_PRIMING).await;
    server.progress(1).await;
    let first = client.event().await.unwrap();
    drop(client);
    server.progress(2).await;
    server.progress(3).await;
    settle().await;
    let mut client = setup.resumed(&first).await;
    assert_eq!(client.event().await.unwrap().data, progress_of(2));
    server.answer().await;
    assert_eq!(client.rest().await, [progress_of(3), answer(1)]);
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_after_the_end_gets_the_answer() {
    let (mut setup, client, primed, server) = Setup::primed().await;
    assert_eq!(primed.data, "");
    drop(client);
    server.answer().await;
    assert_eq!(setup.outcome().await, Outcome::Completed);
    for _ in 0..2 {
        assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_completed_is_not_cancelled_and_waits_for_its_client_past_the_grace() {
    let (mut setup, primed, server) = Setup::detached().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    server.answer().await;
    assert_eq!(setup.outcome().await, Outcome::Completed);
    // Past the grace period, but before the retention ends.
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert!(setup.arrived.is_empty(), "no cancel");
    assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_client_never_resumes_is_cancelled_and_its_stream_closed() {
    let (mut setup, primed, server) = Setup::detached().await;
    let disconnected = tokio::time::Instant::now();
    let cancel = setup.next().await;
    assert!(
        disconnected.elapsed() >= Duration::from_secs(20),
        "the grace"
    );
    assert!(
        cancel.body.contains("notifications/cancelled"),
        "{}",
        cancel.body
    );
    assert_eq!(cancel.headers["mcp-session-id"], SESSION);
    assert!(!server.is_closed());
    cancel.status(202);
    let received = tokio::time::Instant::now();
    in_time(server.closed()).await;
    let kept = received.elapsed();
    assert!(
        kept >= Duration::from_millis(900) && kept < Duration::from_secs(3),
        "{kept:?}"
    );
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(setup.outcome().await, orphaned);
    let late = setup.resumed(&primed).await.rest().await;
    assert!(late[0].contains("-32800"), "{late:?}");
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_before_the_first_event_id_cancels_at_once() {
    let (mut setup, client, server) = Setup::called(WITHOUT_PRIMING).await;
    let before = tokio::time::Instant::now();
    drop(client);
    let cancel = setup.next().await;
    assert!(before.elapsed() < Duration::from_secs(1));
    cancel.status(202);
    in_time(server.closed()).await;
    assert_eq!(setup.outcome().await, DISCONNECTED);
}

#[tokio::test(start_paused = true)]
async fn the_last_of_two_clients_that_resume_reads_the_stream() {
    let (mut setup, mut client, primed, server) = Setup::primed().await;
    let mut first = setup.resumed(&primed).await;
    assert_eq!(
        client.event().await,
        None,
        "another client took over the first stream"
    );
    let mut second = setup.resumed(&primed).await;
    assert_eq!(first.event().await, None);
    // A client whose stream has been taken over has not disconnected.
    tokio::time::sleep(AFTER_GRACE).await;
    assert!(setup.arrived.is_empty());
    server.answer().await;
    assert_eq!(second.rest().await, [answer(1)]);
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_as_the_answer_arrives_gets_it_once() {
    let (mut setup, primed, server) = Setup::detached().await;
    let resume = setup.resume(primed.id.as_deref().unwrap());
    server.answer().await;
    let mut client = in_time(resume).await.unwrap();
    assert_eq!(client.rest().await, [answer(1)]);
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_cut_without_ids_ends_its_call_with_an_error() {
    for is_error in [true, false] {
        let mut setup = Setup::started(WITHOUT_PRIMING).await;
        let (mut client, server) = setup.call(7).await;
        server.progress(1).await;
        if is_error {
            server.cut().await
        } else {
            drop(server)
        }
        let rest = client.rest().await;
        assert_eq!(rest.len(), 2, "{rest:?}");
        assert!(
            rest[1].contains(r#""id":7,"error":{"code":-32603"#),
            "{rest:?}"
        );
        assert_eq!(
            setup.outcome().await,
            Outcome::Cancelled(CancelReason::ResponseDropped),
            "its client got the error"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_has_ids_and_cuts_its_stream_is_asked_for_the_rest() {
    let (mut setup, mut client, primed, server) = Setup::primed().await;
    server.send("id: up/1\nretry: 2000\ndata:\n\n").await;
    server
        .send(format!("id: up/2\ndata: {}\n\ndata: half", progress_of(1)))
        .await;
    server.cut().await;
    let first = client.event().await.unwrap();
    assert_eq!(first.data, progress_of(1));
    assert!(
        !first.id.unwrap().contains("up/"),
        "the server's ids are not sent to the client"
    );
    // The server refuses once, and ends the next stream before the answer.
    let resume = setup.next().await;
    assert_eq!(
        (resume.method.as_str(), &resume.headers["last-event-id"]),
        ("GET", &"up/2".parse().unwrap())
    );
    assert_eq!(resume.headers[header::ACCEPT], "text/event-stream");
    assert!(!resume.headers.contains_key(header::CONTENT_TYPE));
    resume.status(503);
    let second_stream = setup.next().await.events();
    second_stream.send("id: up/3\ndata:\n\n").await;
    drop(second_stream);
    let resume = setup.next().await;
    assert_eq!(resume.headers["last-event-id"], "up/3");
    let last_stream = resume.events();
    last_stream.answer().await;
    assert_eq!(client.rest().await, [answer(1)]);
    assert_eq!(
        setup.resumed(&primed).await.rest().await,
        [progress_of(1), answer(1)]
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_its_own_ids_is_asked_three_times() {
    let (mut setup, mut client, server) = Setup::called(WITHOUT_PRIMING).await;
    server
        .send(format!("id: up/1\ndata: {}\n\n", progress_of(1)))
        .await;
    drop(server);
    for _ in 0..3 {
        setup.next().await.status(404);
    }
    let rest = client.rest().await;
    assert!(rest[1].contains("-32603"), "{rest:?}");
    let cancel = setup.next().await;
    assert!(
        cancel.body.contains("notifications/cancelled"),
        "{}",
        cancel.body
    );
    cancel.status(202);
    settle().await;
    assert!(setup.arrived.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_progress_drops_and_reports_the_oldest_and_keeps_the_answer() {
    let (setup, primed, server) = Setup::detached().await;
    for progress in 0..1_000 {
        server.progress(progress).await;
    }
    server.answer().await;
    settle().await;
    let text = setup.resumed(&primed).await.text().await;
    assert!(
        text.starts_with(": 746 events were dropped here\n\n"),
        "{}",
        &text[..200]
    );
    assert!(text.contains(&progress_of(999)) && text.contains(&answer(1)));
    assert_eq!(text.matches("data: ").count(), 255);
}

#[tokio::test(start_paused = true)]
async fn an_undroppable_event_waits_for_a_connected_client() {
    let (_setup, mut client, server) = Setup::called(WITHOUT_PRIMING).await;
    let sent = async {
        for id in 0..1_000 {
            server.message(&request_of(id)).await;
        }
        server.message(&answer(1)).await;
    };
    tokio::pin!(sent);
    let stuck = tokio::time::timeout(Duration::from_secs(5), &mut sent).await;
    assert!(stuck.is_err(), "no client has read");
    let read = async {
        for id in 0..1_000 {
            assert_eq!(client.event().await.unwrap().data, request_of(id));
        }
        client.event().await.unwrap().data
    };
    let ((), last) = tokio::join!(sent, read);
    assert_eq!(last, answer(1));
}

#[tokio::test(start_paused = true)]
async fn an_undroppable_event_without_room_ends_the_call_of_a_disconnected_client() {
    let (setup, primed, server) = Setup::detached().await;
    for id in 0..255 {
        server.message(&request_of(id)).await;
    }
    settle().await;
    assert!(!server.is_closed());
    server.message(&request_of(255)).await;
    in_time(server.closed()).await;
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest.len(), 256);
    assert!(rest[255].contains(r#""id":1,"error""#), "{}", rest[255]);
}

#[tokio::test(start_paused = true)]
async fn an_event_too_large_to_keep_reaches_a_client_that_is_reading() {
    let (setup, mut client, primed, server) = Setup::primed().await;
    let large = format!(
        r#"{{"jsonrpc":"2.0","id":1,"result":{{"text":"{}"}}}}"#,
        "x".repeat(6 << 20)
    );
    let sent = async {
        server.message(&large).await;
        drop(server);
    };
    let read = async {
        let seen = client.event().await.unwrap();
        assert!(seen.id.is_some());
        assert!(seen.data == large);
        assert_eq!(client.event().await, None);
    };
    tokio::join!(sent, read);
    // The event was not kept, so a client that has missed it gets an error.
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest.len(), 1);
    assert!(rest[0].contains("-32603"), "{rest:?}");
}

#[tokio::test(start_paused = true)]
async fn an_event_of_several_megabytes_is_kept_for_a_resume() {
    let small = Limits {
        bytes: 1 << 20,
        ..Limits::default()
    };
    for (length, limits) in [
        (1 << 20, Limits::default()),
        (5 << 19, Limits::default()),
        (3 << 20, Limits::default()),
        ((4 << 20) - 1024, Limits::default()),
        (700_000, small),
    ] {
        let mut setup = Setup::started_with(WITH_PRIMING, limits).await;
        let (mut client, server) = setup.call(1).await;
        let primed = client.event().await.unwrap();
        drop(client);
        let large = format!(
            r#"{{"jsonrpc":"2.0","id":1,"result":{{"text":"{}"}}}}"#,
            "x".repeat(length)
        );
        for piece in [b"data: " as &[u8], large.as_bytes(), b"\r\n\r\n"] {
            for piece in piece.chunks(100_000) {
                server.send(piece).await;
            }
        }
        drop(server);
        assert_eq!(setup.outcome().await, Outcome::Completed);
        for _ in 0..2 {
            let rest = setup.resumed(&primed).await.rest().await;
            assert!(rest == [large.clone()], "{length}: {:.200}", rest[0]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_within_a_large_event_ends_the_call_with_an_error() {
    let (setup, client, primed, server) = Setup::primed().await;
    let started = async {
        server.send("data: ").await;
        for _ in 0..80 {
            server.send("x".repeat(100_000)).await;
        }
    };
    {
        tokio::pin!(started);
        let stuck = tokio::time::timeout(Duration::from_secs(5), &mut started).await;
        assert!(stuck.is_err());
    }
    drop(client);
    in_time(server.closed()).await;
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest.len(), 1, "no part of the event");
    assert!(rest[0].contains("-32603"), "{rest:?}");
}

#[tokio::test(start_paused = true)]
async fn a_large_event_that_the_server_cuts_does_not_corrupt_the_error_after_it() {
    let (_setup, mut client, server) = Setup::called(WITH_PRIMING).await;
    client.event().await.unwrap();
    let cut = async {
        server.send("data: ").await;
        for _ in 0..80 {
            server.send("x".repeat(100_000)).await;
        }
        server.cut().await;
    };
    let read = async {
        let mut last = None;
        while let Some(block) = client.block().await {
            last = Some(block);
        }
        last.expect("an error")
    };
    let ((), last) = tokio::join!(cut, in_time(read));
    assert!(
        last.starts_with("data: {") && last.contains("-32603"),
        "{}",
        &last[..last.len().min(100)]
    );
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_session_ends_only_its_own_streams() {
    let (mut setup, mut client, primed, server) = Setup::primed().await;
    let other = setup.send(posted("other", call(1)));
    let other_server = setup.next().await.events();
    let mut other = in_time(other).await.unwrap();
    for (status, is_closed) in [(404, false), (204, true)] {
        let request = Request::delete("/mcp")
            .header("mcp-session-id", SESSION)
            .body(Body::empty())
            .unwrap();
        let delete = setup.send(request);
        setup.next().await.status(status);
        assert_eq!(
            in_time(delete).await.unwrap().status,
            status,
            "answered as the server did"
        );
        settle().await;
        assert_eq!(server.is_closed(), is_closed);
    }
    let received = client.rest().await;
    assert!(
        received[0].contains("the session was deleted"),
        "{received:?}"
    );
    assert_eq!(setup.resumed(&primed).await.status, 400);
    other_server.message(&answer(1)).await;
    drop(other_server);
    assert_eq!(other.rest().await, [answer(1)]);
}

#[tokio::test(start_paused = true)]
async fn event_ids_of_other_sessions_and_invented_ids_are_refused_and_others_pass() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (mut client, _server) = setup.call(1).await;
    let id = client.event().await.unwrap().id.unwrap();
    let (stream, _) = id.rsplit_once('.').unwrap();
    for last in [
        format!("{stream}.1"),
        format!("{stream}9.0"),
        format!("{stream}.00"),
        stream.to_owned(),
    ] {
        let refused = in_time(setup.resume(&last)).await.unwrap();
        assert_eq!(refused.status, 400, "{last}");
        assert!(refused.text().await.contains("Last-Event-ID"));
    }
    let refused = in_time(setup.send(resumed("other", &id))).await.unwrap();
    assert_eq!(refused.status, 400);
    for last in ["1/0", "mcp-0123456789abcdef-0.0"] {
        let waiting = setup.resume(last);
        let passed = setup.next().await;
        assert_eq!(passed.headers["last-event-id"], last);
        passed.status(405);
        assert_eq!(in_time(waiting).await.unwrap().status, 405);
    }
    // No other client has taken over the stream.
    assert_eq!(setup.store.stats().resumes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_by_the_client_closes_the_stream_once_the_server_has_accepted_it() {
    let (mut setup, mut client, server) = Setup::called(WITH_PRIMING).await;
    client.event().await.unwrap();
    for (status, is_closed) in [(500, false), (202, true)] {
        let cancel = setup.post(cancel_of(1));
        setup.next().await.status(status);
        assert_eq!(in_time(cancel).await.unwrap().status, status);
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert_eq!(server.is_closed(), is_closed);
    }
    assert_eq!(client.event().await, None);
    assert_eq!(setup.outcome().await, Outcome::ClientCancelled);
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_cancelled_call_is_closed_even_if_the_server_refuses_the_cancel() {
    for status in [401, 404, 503] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let empty = setup.store.stats().buffer_bytes;
        let (mut client, server) = setup.call(1).await;
        client.event().await.unwrap();
        // While the client is connected, a refused cancel has no effect.
        let cancel = setup.post(cancel_of(1));
        setup.next().await.status(status);
        assert_eq!(in_time(cancel).await.unwrap().status, status);
        tokio::time::sleep(AFTER_GRACE).await;
        server.progress(1).await;
        assert_eq!(client.event().await.unwrap().data, progress_of(1));
        drop(client);
        let cancel = setup.next().await;
        assert!(cancel.body.contains("notifications/cancelled"));
        cancel.status(status);
        in_time(server.closed()).await;
        let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
        assert_eq!(setup.outcome().await, orphaned);
        tokio::time::sleep(Duration::from_secs(65)).await;
        let stats = setup.store.stats();
        assert_eq!((stats.streams, stats.buffer_bytes), (0, empty), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_head_closes_the_stream() {
    // The event store knows only the first session. It does not start the other one until it sees the response head, and learns of that
    // cancellation from the call's cancellation token.
    for session in [SESSION, "other"] {
        let mut setup = Setup::started(WITHOUT_PRIMING).await;
        let waiting = setup.send(posted(session, call(1)));
        let arrived = setup.next().await;
        let cancel = setup.send(posted(session, cancel_of(1)));
        setup.next().await.status(202);
        assert_eq!(in_time(cancel).await.unwrap().status, 202);
        let server = arrived.events();
        let client = in_time(waiting).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert!(server.is_closed(), "{session}");
        drop(client);
        tokio::time::sleep(Duration::from_secs(65)).await;
        assert!(setup.arrived.is_empty(), "no second cancel");
        assert_eq!(setup.store.stats().streams, 0, "{session}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_the_server_never_ends_is_closed_after_the_answer() {
    let (_setup, mut client, server) = Setup::called(WITHOUT_PRIMING).await;
    server.message(&answer(1)).await;
    assert_eq!(client.event().await.unwrap().data, answer(1));
    in_time(server.closed()).await;
    assert_eq!(client.event().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_slow_json_answer_becomes_an_event_that_can_be_resumed() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    let mut client = in_time(waiting).await.unwrap();
    assert_eq!(client.headers[header::CONTENT_TYPE], "text/event-stream");
    let primed = client.event().await.unwrap();
    drop(client);
    arrived.json("{\"jsonrpc\":\"2.0\",\r\n\"id\":1.0,\"result\":{\"n\":1.0}}\n");
    assert_eq!(setup.outcome().await, Outcome::Completed);
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(
        rest,
        [r#"{"jsonrpc":"2.0",  "id":1.0,"result":{"n":1.0}} "#]
    );
}

#[tokio::test(start_paused = true)]
async fn a_slow_json_answer_with_a_byte_order_mark_becomes_an_event_without_it() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    let mut client = in_time(waiting).await.unwrap();
    client.event().await.unwrap();
    arrived.json(&format!("\u{feff}{}", answer(1)));
    assert_eq!(client.rest().await, [answer(1)]);
}

/// Revision 2025-03-26 lets a server batch its answers.
#[tokio::test(start_paused = true)]
async fn a_batch_with_the_answer_is_the_answer() {
    let batch = format!("[{},{}]", progress_of(1), answer(1));
    let (mut setup, primed, server) = Setup::detached().await;
    server.message(&batch).await;
    drop(server);
    assert_eq!(setup.outcome().await, Outcome::Completed);
    let rest = setup.resumed(&primed).await.rest().await;
    assert_eq!(rest, std::slice::from_ref(&batch));
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    let mut client = in_time(waiting).await.unwrap();
    client.event().await.unwrap();
    arrived.json(&batch);
    assert_eq!(client.rest().await, [batch]);
}

/// Servers send `identity` to keep middleware from compressing their streams.
#[tokio::test(start_paused = true)]
async fn an_answer_that_is_marked_as_not_compressed_can_be_resumed() {
    let marked = |content_type: &str, body: String| {
        Response::builder()
            .header(header::CONTENT_TYPE, content_type)
            .header(header::CONTENT_ENCODING, "identity")
            .body(Body::from(body))
            .unwrap()
    };
    let event = format!("data: {}\n\n", answer(1));
    for (content_type, body) in [
        ("application/json", answer(1)),
        ("text/event-stream", event.clone()),
    ] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let waiting = setup.post(call(1));
        let arrived = setup.next().await;
        let mut client = in_time(waiting).await.unwrap();
        let primed = client.event().await.unwrap();
        drop(client);
        arrived.answer(marked(content_type, body));
        assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
    }
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    arrived.answer(marked("text/event-stream", event));
    let primed = in_time(waiting).await.unwrap().event().await.unwrap();
    assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_slow_refusal_becomes_an_error_with_its_text() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    for (body, expected) in [
        (
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no","data":1.0}}"#,
            r#"{"code":-32000,"message":"no","data":1.0}"#,
        ),
        ("<html>", "HTTP status 500"),
        (r#"{"error":"no"}"#, "HTTP status 500"),
    ] {
        let waiting = setup.post(call(1));
        let arrived = setup.next().await;
        let mut client = in_time(waiting).await.unwrap();
        arrived.answer(
            Response::builder()
                .status(500)
                .body(Body::from(body))
                .unwrap(),
        );
        let rest = client.rest().await;
        assert!(
            rest[1].contains(expected) && rest[1].contains(r#""id":1,"#),
            "{rest:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn slow_json_that_does_not_answer_the_call_is_forwarded_and_an_error_follows() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    for json in [
        "",
        "7",
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700}}"#,
    ] {
        let waiting = setup.post(call(1));
        let arrived = setup.next().await;
        let mut client = in_time(waiting).await.unwrap();
        client.event().await.unwrap();
        arrived.json(json);
        let mut rest = client.rest().await;
        let error = rest.pop().unwrap();
        assert!(error.contains(r#""id":1,"error""#), "{error}");
        assert_eq!(rest.concat(), json);
    }
}

#[tokio::test(start_paused = true)]
async fn a_fast_answer_passes_unchanged() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    for (status, media_type) in [
        (200, "application/json"),
        (401, "text/event-stream"),
        (202, "text/plain"),
    ] {
        let waiting = setup.post(call(1));
        let response = Response::builder()
            .status(status)
            .header(header::CONTENT_TYPE, media_type)
            .header("www-authenticate", "Bearer")
            .body(Body::from("as it is"))
            .unwrap();
        setup.next().await.answer(response);
        let client = in_time(waiting).await.unwrap();
        assert_eq!(client.status, status);
        assert_eq!(client.headers["www-authenticate"], "Bearer");
        assert_eq!(client.text().await, "as it is");
    }
    assert_eq!(setup.store.stats().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn no_head_is_sent_early_to_clients_without_support_for_priming_or_events() {
    let mut setup = Setup::started(WITHOUT_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!waiting.is_finished());
    arrived.json(&answer(1));
    assert_eq!(in_time(waiting).await.unwrap().text().await, answer(1));

    let mut setup = Setup::started(WITH_PRIMING).await;
    let mut request = posted(SESSION, call(1));
    request
        .headers_mut()
        .insert(header::ACCEPT, "application/json".parse().unwrap());
    let waiting = setup.send(request);
    let arrived = setup.next().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!waiting.is_finished());
    arrived.json(&answer(1));
    assert_eq!(in_time(waiting).await.unwrap().text().await, answer(1));
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_before_the_head_cancels_the_call() {
    let mut setup = Setup::started(WITHOUT_PRIMING).await;
    let waiting = setup.post(call(1));
    let arrived = setup.next().await;
    waiting.abort();
    in_time(arrived.aborted()).await;
    setup.next().await.status(202);
    assert_eq!(setup.outcome().await, DISCONNECTED);
    assert_eq!(setup.store.stats().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn other_requests_pass_with_the_ids_of_the_server() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let events = format!("id: up/1\ndata: {}\n\n", answer(1));
    let sessionless = Request::post("/mcp").body(Body::from(call(1))).unwrap();
    let mut newer = posted(SESSION, call(1));
    newer
        .headers_mut()
        .insert("mcp-protocol-version", "2026-07-28".parse().unwrap());
    let mut ambiguous = posted(SESSION, call(1));
    ambiguous
        .headers_mut()
        .append("mcp-session-id", "b".parse().unwrap());
    let standalone = Request::get("/mcp")
        .header("mcp-session-id", SESSION)
        .body(Body::empty())
        .unwrap();
    let batch = posted(SESSION, format!("[{}]", call(1)));
    for request in [sessionless, newer, ambiguous, standalone, batch] {
        let waiting = setup.send(request);
        let server = setup.next().await.events();
        let client = in_time(waiting).await.unwrap();
        server.send(&events).await;
        drop(server);
        assert_eq!(client.text().await, events);
    }
    assert_eq!(setup.store.stats().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_with_trailers_or_an_identity_coding_can_be_resumed() {
    let trailers = HeaderMap::from_iter([(header::EXPIRES, header::HeaderValue::from_static("0"))]);
    let frames = [
        Ok::<_, std::io::Error>(http_body::Frame::data(call(1).into())),
        Ok(http_body::Frame::trailers(trailers)),
    ];
    let body = StreamBody::new(futures_util::stream::iter(frames));
    let with_trailers = posted(SESSION, "").map(|_| Body::new(body));
    let mut marked = posted(SESSION, call(1));
    let identity = header::HeaderValue::from_static("identity");
    marked
        .headers_mut()
        .insert(header::CONTENT_ENCODING, identity);
    for request in [with_trailers, marked] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let waiting = setup.send(request);
        let arrived = setup.next().await;
        assert_eq!(arrived.body, call(1));
        let server = arrived.events();
        let primed = in_time(waiting).await.unwrap().event().await.unwrap();
        server.answer().await;
        assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
    }
}

#[tokio::test(start_paused = true)]
async fn request_bodies_pass_byte_for_byte_however_large() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let large = format!(
        r#"{{"id":1,"method":"a","params":"{}"}}"#,
        "x".repeat(5 << 20)
    );
    for body in [
        "",
        "no json",
        "{\"id\" : 1e2 ,\n\"method\":\"a\\u0062\", \"x\":1.0}",
        &large,
    ] {
        let frames: Vec<Result<bytes::Bytes, std::io::Error>> = body
            .as_bytes()
            .chunks(100_001)
            .map(|piece| Ok(bytes::Bytes::copy_from_slice(piece)))
            .collect();
        let request =
            posted(SESSION, "").map(|_| Body::from_stream(futures_util::stream::iter(frames)));
        let waiting = setup.send(request);
        let arrived = setup.next().await;
        assert!(arrived.body == body);
        arrived.status(202);
        assert_eq!(in_time(waiting).await.unwrap().status, 202);
    }
}

#[tokio::test(start_paused = true)]
async fn the_server_decides_about_a_client_that_resumes_with_another_authorization() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let authorized = |mut request: Request<Body>, token: &str| {
        request
            .headers_mut()
            .insert(header::AUTHORIZATION, token.parse().unwrap());
        request
    };
    let waiting = setup.send(authorized(posted(SESSION, call(1)), "a"));
    let server = setup.next().await.events();
    let mut client = in_time(waiting).await.unwrap();
    let last = client.event().await.unwrap().id.unwrap();
    let waiting = setup.send(resumed(SESSION, &last));
    let ping = setup.next().await;
    assert!(ping.body.contains(r#""method":"ping""#));
    ping.status(401);
    assert_eq!(in_time(waiting).await.unwrap().status, 401);
    let waiting = setup.send(authorized(resumed(SESSION, &last), "b"));
    let ping = setup.next().await;
    assert_eq!(ping.headers[header::AUTHORIZATION], "b");
    ping.pong();
    let mut fresh = in_time(waiting).await.unwrap();
    let mut same = in_time(setup.send(authorized(resumed(SESSION, &last), "b")))
        .await
        .unwrap();
    assert_eq!(fresh.event().await, None);
    server.answer().await;
    assert_eq!(same.rest().await, [answer(1)]);
}

#[tokio::test(start_paused = true)]
async fn without_room_a_call_has_no_ids_and_a_disconnect_cancels_it_at_once() {
    let limits = Limits {
        bytes: 3_000,
        ..Limits::default()
    };
    let mut setup = Setup::started_with(WITH_PRIMING, limits).await;
    let (client, server) = setup.call(1).await;
    drop(client);
    let before = tokio::time::Instant::now();
    setup.next().await.status(202);
    assert!(before.elapsed() < Duration::from_secs(1));
    in_time(server.closed()).await;
    let (client, server) = setup.call(2).await;
    server.message(&answer(2)).await;
    drop(server);
    assert_eq!(client.text().await, format!("data: {}\n\n", answer(2)));
}

#[tokio::test(start_paused = true)]
async fn fully_read_streams_are_evicted_for_others() {
    let limits = Limits {
        bytes: 60_000,
        ..Limits::default()
    };
    let mut setup = Setup::started_with(WITH_PRIMING, limits).await;
    for id in 0..100 {
        let (mut client, server) = setup.call(id).await;
        server.message(&answer(id)).await;
        drop(server);
        let rest = client.rest().await;
        assert_eq!(
            rest,
            ["".to_owned(), answer(id)],
            "primed, so there was room"
        );
        assert!(setup.store.stats().buffer_bytes <= limits.bytes);
    }
}

#[tokio::test(start_paused = true)]
async fn streams_are_removed_a_minute_after_their_end_and_release_everything() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let empty = setup.store.stats().buffer_bytes;
    let mut last = None;
    for id in 0..10 {
        let (mut client, server) = setup.call(id).await;
        last = client.event().await;
        if id % 2 == 0 {
            drop(client);
        }
        server.message(&answer(id)).await;
    }
    settle().await;
    assert_eq!(setup.store.stats().streams, 10);
    tokio::time::sleep(Duration::from_secs(65)).await;
    assert_eq!(setup.store.stats().streams, 0);
    assert_eq!(setup.store.stats().buffer_bytes, empty);
    assert_eq!(setup.resumed(&last.unwrap()).await.status, 400);
}

#[tokio::test(start_paused = true)]
async fn when_everything_is_dropped_no_task_and_no_byte_is_left() {
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let before = tasks();
    let mut setup = Setup::started(WITH_PRIMING).await;
    let mut streams = Vec::new();
    for id in 0..5 {
        let (mut client, server) = setup.call(id).await;
        client.event().await.unwrap();
        server.progress(1).await;
        streams.push((client, server));
    }
    let server = streams.pop().unwrap().1;
    server.message(&answer(4)).await;
    drop(server);
    setup.outcome().await;
    let clients: Vec<_> = streams
        .into_iter()
        .map(|(client, server)| (drop(server), client))
        .collect();
    settle().await;
    drop(clients);
    let store = setup.into_event_store();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(store.stats().streams, 0);
    store.close(SESSION);
    assert_eq!(store.stats().buffer_bytes, 0);
    drop(store);
    settle().await;
    assert_eq!(tasks(), before);
}

#[tokio::test(start_paused = true)]
async fn a_full_standalone_stream_is_logged_once() {
    let (log, lines) = std::sync::mpsc::channel();
    let subscriber = tracing_subscriber::fmt().with_writer(move || Log(log.clone()));
    let _on_this_thread = tracing::subscriber::set_default(subscriber.finish());
    let limits = Limits {
        events: 1,
        ..Limits::default()
    };
    let store = EventStore::new(limits);
    let session = store.begin(SESSION, None).unwrap();
    let stream = session.open_standalone().unwrap();
    let json = br#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;
    let mut refused = 0;
    for _ in 0..10 {
        let pushed = stream.push(StoreEvent::message(json, None)).await;
        refused += usize::from(pushed.is_err());
    }
    assert_eq!(refused, 9);
    assert_eq!(lines.try_iter().count(), 1);
}

/// A writer that sends a message for each log line.
struct Log(std::sync::mpsc::Sender<()>);

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        // No receiver is left once the test is over.
        let _ = self.0.send(());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the cancellation that the server receives within ten minutes, if any.
async fn cancel_within_ten_minutes(setup: &mut Setup) -> Option<String> {
    let arrived = tokio::time::timeout(Duration::from_secs(600), setup.arrived.recv());
    let body = arrived.await.ok()??.body;
    body.contains("notifications/cancelled").then_some(body)
}

/// After 60 s, a reverse proxy in front of the server cuts a silent tool's response, which neither the server nor the tool notices.
#[tokio::test(start_paused = true)]
async fn a_server_whose_stream_was_cut_is_notified_that_no_client_waits_for_the_answer() {
    let (mut setup, mut client, server) = Setup::called(WITHOUT_PRIMING).await;
    server.progress(1).await;
    server.cut().await;
    let rest = client.rest().await;
    assert!(rest[1].contains("ended before its answer"), "{rest:?}");
    let cancel = cancel_within_ten_minutes(&mut setup).await;
    assert!(cancel.is_some(), "the tool keeps running for nobody");
}

/// A client might add the field to headers that already have it.
#[tokio::test(start_paused = true)]
async fn a_resume_that_repeats_its_header_field_gets_the_events() {
    let (setup, primed, server) = Setup::detached().await;
    server.answer().await;
    settle().await;
    let mut resume = resumed(SESSION, primed.id.as_deref().unwrap());
    let last = resume.headers()["last-event-id"].clone();
    resume.headers_mut().append("last-event-id", last);
    let text = in_time(setup.send(resume)).await.unwrap().text().await;
    assert!(text.contains(&answer(1)), "{text}");
}

/// Many servers close a call's streams before they answer the client's own cancellation or DELETE.
#[tokio::test(start_paused = true)]
async fn a_call_ended_by_its_client_is_not_a_lost_answer() {
    for deletes in [true, false] {
        let (mut setup, _client, server) = Setup::called(WITHOUT_PRIMING).await;
        let waiting = if deletes {
            let delete = Request::delete("/mcp").header("mcp-session-id", SESSION);
            setup.send(delete.body(Body::empty()).unwrap())
        } else {
            setup.post(cancel_of(1))
        };
        let ending = setup.next().await;
        server.cut().await;
        settle().await;
        ending.status(202);
        assert_eq!(in_time(waiting).await.unwrap().status, 202);
        let outcome = setup.ended.recv().await.unwrap();
        let lost = Outcome::Cancelled(CancelReason::ResponseDropped);
        assert_ne!(outcome, lost, "deletes: {deletes}");
        let cancel = cancel_within_ten_minutes(&mut setup).await;
        assert!(cancel.is_none(), "deletes: {deletes}");
    }
}

/// The proxy itself answers 502 with such an error if its connection to the server is closed.
#[tokio::test(start_paused = true)]
async fn a_server_whose_gateway_gave_up_with_an_error_of_its_own_is_notified() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let waiting = setup.post(call(1));
    let server = setup.next().await;
    let mut client = in_time(waiting).await.unwrap();
    let error = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"gone"}}"#;
    let response = Response::builder().status(502).body(Body::from(error));
    server.answer(response.unwrap());
    let rest = client.rest().await;
    assert!(rest[1].contains("gone"), "{rest:?}");
    let cancel = cancel_within_ten_minutes(&mut setup).await;
    assert!(cancel.is_some(), "the tool keeps running for nobody");
}

/// By then the client has an event stream. A gateway in front of the server gives up, or the server itself refuses.
#[tokio::test(start_paused = true)]
async fn a_server_whose_gateway_gave_up_is_notified_that_no_client_waits_for_the_answer() {
    for (status, is_cancelled) in [(504, true), (502, true), (404, false), (500, false)] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let waiting = setup.post(call(1));
        let server = setup.next().await;
        let mut client = in_time(waiting).await.unwrap();
        server.status(status);
        let rest = client.rest().await;
        assert!(rest[1].contains(&status.to_string()), "{rest:?}");
        let cancel = cancel_within_ten_minutes(&mut setup).await;
        assert_eq!(cancel.is_some(), is_cancelled, "{status}");
    }
}

/// The client resumes, and learns that its call has ended with an error.
#[tokio::test(start_paused = true)]
async fn a_server_whose_events_found_no_room_is_notified_that_no_client_waits_for_the_answer() {
    let (mut setup, primed, server) = Setup::detached().await;
    for id in 0..256 {
        server.message(&request_of(id)).await;
    }
    in_time(server.closed()).await;
    let rest = setup.resumed(&primed).await.rest().await;
    assert!(rest[255].contains(r#""id":1,"error""#), "{}", rest[255]);
    let cancel = cancel_within_ten_minutes(&mut setup).await;
    assert!(cancel.is_some(), "the tool keeps running for nobody");
}

/// Clients open sessions and never delete them, as those using the TypeScript SDK do. For a long time those sessions have no streams.
#[tokio::test(start_paused = true)]
async fn unused_sessions_make_room_for_new_ones() {
    // The minimum for `--buffer`, and a gateway with long session ids.
    for (bytes, id_length) in [(1 << 20, 32), (64 << 20, 8_000)] {
        let store = EventStore::new(Limits {
            bytes,
            ..Limits::default()
        });
        for number in 0..4_000 {
            let id = format!("{number:0>id_length$}");
            store.begin(&id, Some(WITH_PRIMING));
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        let session = store.begin("new", Some(WITH_PRIMING));
        let stream = session.and_then(|session| session.open(Call::new("1")?));
        assert!(
            stream.is_some(),
            "no room for a session: {} sessions without a stream take up {} bytes",
            store.stats().sessions,
            store.stats().buffer_bytes
        );
    }
}

/// A session with a stream that its client may resume, and one with a request in flight.
#[tokio::test(start_paused = true)]
async fn sessions_in_use_are_kept_when_there_is_no_room() {
    let store = EventStore::new(Limits {
        bytes: 1 << 20,
        ..Limits::default()
    });
    let open = |session: Session, id: &str| session.open(Call::new(id)?);
    let resumable = store.begin("resumable", Some(WITH_PRIMING)).unwrap();
    let stream = open(resumable, "1").unwrap();
    stream.prime();
    let in_flight = store.begin("in flight", Some(WITH_PRIMING)).unwrap();
    for number in 0..2_000 {
        store.begin(&number.to_string(), Some(WITH_PRIMING));
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert!(store.stats().sessions < 1_100, "{:?}", store.stats());
    assert!(store.session("resumable").is_some());
    assert!(store.session("in flight").is_some());
    assert!(open(in_flight, "1").is_some());
}

/// Servers log, and their clients do not read the standalone stream.
#[tokio::test(start_paused = true)]
async fn unread_log_events_make_room_for_other_sessions() {
    let store = EventStore::new(Limits {
        bytes: 1 << 20,
        ..Limits::default()
    });
    let log = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"data":"{}"}}}}"#,
        "x".repeat(4_000)
    );
    let mut logging = Vec::new();
    for number in 0..8 {
        let session = store.begin(&number.to_string(), Some(WITH_PRIMING));
        let session = session.expect("room for a session");
        let stream = session.open_standalone().expect("room for a stream");
        for _ in 0..64 {
            let _ = stream.push_now(StoreEvent::message(log.as_bytes(), None));
        }
        logging.push((session, stream));
    }
    let session = store.begin("new", Some(WITH_PRIMING)).expect("room");
    let stream = session.open(Call::new("1").unwrap()).expect("room");
    let question = StoreEvent::message(&[b'x'; 100_000], None);
    stream.push_now(question).expect("room for an event");
    drop(logging);
}
