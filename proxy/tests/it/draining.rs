//! Shutting down the program, in bounded time.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::time::sleep;

use crate::support::*;

/// Longer than it takes to close the connections without an answer.
const AFTER_CLOSING: Duration = Duration::from_millis(800);

/// A window too small for the events of `send_questions_and_the_answer`.
///
/// This keeps the client from receiving them all at once.
const SMALL_WINDOW: u32 = 64;

/// Sends requests from the server, and then the answer.
async fn send_questions_and_the_answer(received: &mut ReceivedRequest) {
    for id in 0..8 {
        let question = format!(r#"{{"jsonrpc":"2.0","id":"q{id}","method":"roots/list"}}"#);
        received.chunk(&format!("data: {question}\n\n")).await;
    }
    received.send_result().await;
}

#[tokio::test]
async fn a_call_that_ends_in_time_gets_its_answer() {
    let (upstream, mut proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;

    proxy.stop();

    let admin = proxy.admin.expect("an address");
    let ready = Request::new("GET", "/readyz");
    while Connection::fetch(admin, &ready).await.status != 503 {}
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received.chunk(&format!("data: {answer}\n\n")).await;
    assert_eq!(
        client.answer_event().await.expect("the answer").data,
        answer
    );
    received.end().await;
    proxy.ended().await;
}

#[tokio::test]
async fn a_client_that_reads_slowly_still_gets_an_answer_from_before_the_limit() {
    let (upstream, mut proxy) = Running::start(&[]).await;
    let mut connection = H2::open_with_window(proxy.addr, SMALL_WINDOW).await;
    let mut call = connection.send(&session_call("1")).await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    call.head().await;

    proxy.stop();
    send_questions_and_the_answer(&mut received).await;
    received.end().await;
    proxy.calls_reach(0).await;
    sleep(AFTER_CLOSING).await;

    assert!(call.answer().await.expect("the answer")["result"].is_object());
    assert!(call.event().await.is_none());
    drop((call, connection));
    proxy.ended().await;
}

#[tokio::test]
async fn a_call_that_keeps_running_without_its_client_may_continue() {
    let (upstream, mut proxy) = Running::start(&["--exempt=work"]).await;
    let (client, received) = proxy.streaming(&upstream, &stateless_call("1")).await;
    client.fin();
    proxy.calls_reach(0).await;

    proxy.stop();

    sleep(AFTER_CLOSING).await;
    assert!(!proxy.has_ended());
    received.answer_at_length().await;
    proxy.ended().await;
}

#[tokio::test]
async fn a_client_that_resumes_for_its_answer_gets_it() {
    let (upstream, mut proxy) = Running::start(&[]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;
    received
        .chunk("data: {\"jsonrpc\":\"2.0\",\"id\":\"q\",\"method\":\"roots/list\"}\n\n")
        .await;
    let last = client.event().await.and_then(|event| event.id);
    client.rst();
    send_questions_and_the_answer(&mut received).await;
    received.end().await;
    proxy.calls_reach(0).await;
    let resume = resume_after(&last.expect("an id"));
    let mut connection = H2::open_with_window(proxy.addr, SMALL_WINDOW).await;
    let mut resumed = connection.send(&resume).await;
    assert_eq!(resumed.head().await.status, 200);

    proxy.stop();

    assert!(resumed.answer().await.expect("the answer")["result"].is_object());
    drop((resumed, connection));
    proxy.ended().await;
}

/// The proxy sends a reconnect delay of 1 s.
#[tokio::test]
async fn a_client_that_was_asked_to_wait_gets_its_answer() {
    let (upstream, mut proxy) = Running::start(&["--grace=4s"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;
    let last = client.event().await.and_then(|event| event.id);
    client.rst();
    proxy.stop();
    received.send_result().await;
    received.end().await;
    proxy.calls_reach(0).await;

    sleep(Duration::from_secs(1)).await;
    let resume = resume_after(&last.expect("an id"));
    let mut resumed = Connection::sending(proxy.addr, &resume).await;

    assert!(resumed.answer().await.expect("the answer")["result"].is_object());
    proxy.ended().await;
}

#[tokio::test]
async fn an_initialize_during_the_shutdown_is_answered() {
    let script = r#"read line; sleep 1; echo '{"jsonrpc":"2.0","id":"a","result":{}}'; cat"#;
    let args = ["--listen=127.0.0.1:0", "--", "sh", "-c", script];
    let mut program = Program::start(Program::command(&args));
    let client = Mcp::stateless(program.addr(), "/mcp");
    let mut opening = client.request("a", "initialize", json!({})).await;
    opening.head().await;

    program.signal(Signal::TERM);

    let answer = opening.answer().await.expect("an answer");
    assert!(answer["result"].is_object(), "{answer}");
    let (status, logged) = program.ended().await;
    assert!(status.success(), "{logged}");
}

#[tokio::test]
async fn an_answer_that_is_not_a_stream_may_take_the_whole_drain() {
    let upstream = Upstream::start().await;
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    let (first, rest) = answer.split_at(10);
    for call in [session_call("1"), stateless_call("1")] {
        let mut proxy = Running::in_front_of(&upstream, &[]).await;
        let mut client = Connection::sending(proxy.addr, &call).await;
        let mut received = upstream.next_request().await;
        let length = answer.len();
        received
            .write(format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{first}"))
            .await;
        client.head().await;

        proxy.stop();

        sleep(AFTER_CLOSING).await;
        received.write(rest).await;
        assert_eq!(client.answer().await.expect("the answer")["id"], 1);
        assert!(client.is_complete());
        proxy.ended().await;
    }
}

/// The layer does not track such a request, so only its connection keeps it in flight.
#[tokio::test]
async fn an_answer_whose_head_has_not_arrived_may_take_the_whole_drain() {
    let initialize = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    let batch = format!("[{},{}]", call("1"), call("2"));
    for request in [
        post(initialize),
        post(&batch).header("mcp-session-id", "s"),
        stateless_call("0.5"),
    ] {
        let (upstream, mut proxy) = Running::start(&[]).await;
        let mut client = Connection::sending(proxy.addr, &request).await;
        let received = upstream.next_request().await;

        proxy.stop();

        sleep(AFTER_CLOSING).await;
        let head = "200 OK\r\ncontent-type: application/json";
        received.answer(head, "{}").await;
        assert_eq!(client.reply().await.text(), "{}");
        proxy.ended().await;
    }
}

#[tokio::test]
async fn a_stream_without_a_head_does_not_delay_the_shutdown() {
    let (upstream, mut proxy) = Running::start(&["--drain=1h"]).await;
    let mut client = Connection::open(proxy.addr).await;
    let listen = Request::new("GET", "/mcp").header("mcp-session-id", "s");
    client.send(&listen).await;
    let _silent = upstream.next_request().await;
    proxy.stop();
    proxy.ended().await;
}

#[tokio::test]
async fn a_call_that_does_not_end_is_cancelled_with_an_error_to_its_client() {
    let (upstream, mut proxy) = Running::start(&["--drain=100ms"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;

    proxy.stop();

    let answer = client.answer().await.expect("an error");
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&1.into(), &(-32800).into())
    );
    let cancel = upstream.next_request().await;
    assert!(cancel.body().contains("notifications/cancelled"));
    cancel.answer("202 Accepted", "").await;
    proxy.ended().await;
    received.closed().await;
}

#[tokio::test]
async fn connections_that_never_end_are_cut() {
    let (upstream, mut proxy) = Running::start(&["--drain=100ms"]).await;
    let mut idle = Connection::open(proxy.addr).await;
    let mut half = Connection::open(proxy.addr).await;
    half.send_cut(&post("{"), 100).await;
    let listen = Request::new("GET", "/mcp").header("mcp-session-id", "s");
    let (mut listening, _received) = proxy.streaming(&upstream, &listen).await;

    proxy.stop();

    proxy.ended().await;
    for connection in [&mut idle, &mut half, &mut listening] {
        connection.closed().await;
    }
}

#[tokio::test]
async fn many_open_streams_do_not_delay_the_shutdown() {
    let (upstream, mut proxy) = Running::start(&["--drain=100ms"]).await;
    let mut open = Vec::new();
    for _ in 0..100 {
        let (client, received) = proxy.streaming(&upstream, &stateless_call("1")).await;
        open.push((client, received));
    }

    proxy.stop();

    for (mut client, mut received) in open {
        let answer = client.answer().await.expect("an error");
        assert_eq!(answer["error"]["code"], -32800);
        received.closed().await;
    }
    proxy.ended().await;
}

/// Starts the program in front of a server that has a call in flight.
async fn with_call(
    upstream: &Upstream,
    options: &[&str],
) -> (Program, Connection, ReceivedRequest) {
    let url = format!("http://{}/mcp", upstream.addr);
    let mut args = vec!["--listen=127.0.0.1:0", "--upstream", &url];
    args.extend(options);
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let mut client = Connection::sending(addr, &session_call("1")).await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    client.head().await;
    (program, client, received)
}

#[tokio::test]
async fn either_signal_ends_the_program_when_its_calls_have_ended() {
    for signal in [Signal::TERM, Signal::INT] {
        let upstream = Upstream::start().await;
        let (program, mut client, mut received) = with_call(&upstream, &[]).await;
        program.signal(signal);
        received.send_result().await;
        assert!(client.answer_event().await.is_some());
        received.end().await;
        let (status, logged) = program.ended().await;
        assert!(status.success(), "{logged}");
        assert!(logged.contains("drained"), "{logged}");
    }
}

#[tokio::test]
async fn the_log_has_the_numbers_of_ended_and_cancelled_calls() {
    for (is_answered, message) in [
        (true, "calls drained (--drain) ended=1 cancelled=0"),
        (false, "calls drained (--drain) ended=0 cancelled=1"),
    ] {
        let upstream = Upstream::start().await;
        let options = ["--admin=127.0.0.1:0", "--drain=2s"];
        let (mut program, mut client, mut received) = with_call(&upstream, &options).await;
        let line = program.line();
        let (_, rest) = line.split_once("on http://").expect("the second line");
        let (admin, _) = rest.split_once('/').expect("a path");
        let admin = admin.parse().expect("an address");

        program.signal(Signal::TERM);

        let ready = Request::new("GET", "/readyz");
        while Connection::fetch(admin, &ready).await.status != 503 {}
        if is_answered {
            received.send_result().await;
        }
        assert!(client.answer_event().await.is_some());
        let (_, logged) = program.ended().await;
        assert!(logged.contains(message), "{logged}");
    }
}

#[tokio::test]
async fn a_second_signal_ends_the_program_at_once() {
    let upstream = Upstream::start().await;
    let (mut program, mut client, _received) = with_call(&upstream, &["--drain=1h"]).await;
    program.signal(Signal::TERM);
    assert!(
        program
            .line()
            .contains("SIGTERM: waiting up to 3600s for calls (--drain); signal again to stop now")
    );
    sleep(REPEAT_WINDOW).await;
    program.signal(Signal::TERM);
    let (status, logged) = program.ended().await;
    assert!(status.success(), "{logged}");
    client.closed().await;
}

/// A process manager signals a whole process group, and npm, which is in that group, forwards the signal as well.
#[tokio::test]
async fn a_signal_that_arrives_twice_loses_no_call() {
    let upstream = Upstream::start().await;
    let (mut program, mut client, mut received) = with_call(&upstream, &["--drain=1h"]).await;
    program.signal(Signal::TERM);
    while !program.line().contains("SIGTERM: waiting up to") {}
    program.signal(Signal::TERM);
    while !program.line().contains("signal ignored") {}
    received.send_result().await;
    assert!(client.answer_event().await.is_some());
    let (status, logged) = program.ended().await;
    assert!(status.success(), "{logged}");
}
