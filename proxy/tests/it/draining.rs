//! The end of the program, which comes in time.

use rustix::process::Signal;

use crate::support::*;

#[tokio::test]
async fn a_call_that_ends_in_time_gets_its_answer() {
    let upstream = Upstream::start().await;
    let mut proxy = Running::before(&upstream, &["--admin=127.0.0.1:0"]).await;
    let mut client = Connection::open(proxy.addr).await;
    client.send(&session_call("1")).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    client.head().await;

    proxy.stop();

    let admin = proxy.admin.expect("an address");
    let ready = Request::new("GET", "/readyz");
    while Connection::fetch(admin, &ready).await.status != 503 {}
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    asked.chunk(&format!("data: {answer}\n\n")).await;
    assert_eq!(
        client.answer_event().await.expect("the answer").data,
        answer
    );
    asked.end().await;
    proxy.ended().await;
}

#[tokio::test]
async fn a_call_that_does_not_is_cancelled_and_its_client_is_told() {
    let upstream = Upstream::start().await;
    let mut proxy = Running::before(&upstream, &["--drain=100ms"]).await;
    let mut client = Connection::open(proxy.addr).await;
    client.send(&session_call("1")).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    client.head().await;

    proxy.stop();

    let answer = client.answer().await.expect("an error");
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&1.into(), &(-32800).into())
    );
    let cancel = upstream.asked().await;
    assert!(cancel.body().contains("notifications/cancelled"));
    cancel.answer("202 Accepted", "").await;
    proxy.ended().await;
    asked.gone().await;
}

#[tokio::test]
async fn connections_that_never_end_are_cut() {
    let upstream = Upstream::start().await;
    let mut proxy = Running::before(&upstream, &["--drain=100ms"]).await;
    let mut idle = Connection::open(proxy.addr).await;
    let mut half = Connection::open(proxy.addr).await;
    half.send_cut(&post("{"), 100).await;
    let listen = Request::new("GET", "/mcp").header("mcp-session-id", "s");
    let mut standing = Connection::open(proxy.addr).await;
    standing.send(&listen).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    standing.head().await;

    proxy.stop();

    proxy.ended().await;
    for connection in [&mut idle, &mut half, &mut standing] {
        connection.closed().await;
    }
}

#[tokio::test]
async fn many_open_streams_do_not_hold_it_up() {
    let upstream = Upstream::start().await;
    let mut proxy = Running::before(&upstream, &["--drain=100ms"]).await;
    let mut open = Vec::new();
    for _ in 0..100 {
        let mut client = Connection::open(proxy.addr).await;
        client.send(&stateless_call("1")).await;
        let mut asked = upstream.asked().await;
        asked.stream().await;
        client.head().await;
        open.push((client, asked));
    }

    proxy.stop();

    for (mut client, mut asked) in open {
        let answer = client.answer().await.expect("an error");
        assert_eq!(answer["error"]["code"], -32800);
        asked.gone().await;
    }
    proxy.ended().await;
}

/// The program, in front of a server that has a call under way.
async fn with_call(upstream: &Upstream, options: &[&str]) -> (Program, Connection, Asked) {
    let url = format!("http://{}/mcp", upstream.addr);
    let mut args = vec!["--listen=127.0.0.1:0", "--upstream", &url];
    args.extend(options);
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let mut client = Connection::open(addr).await;
    client.send(&session_call("1")).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    client.head().await;
    (program, client, asked)
}

#[tokio::test]
async fn either_signal_ends_the_program_when_its_calls_have_ended() {
    for signal in [Signal::TERM, Signal::INT] {
        let upstream = Upstream::start().await;
        let (program, mut client, mut asked) = with_call(&upstream, &[]).await;
        program.signal(signal);
        asked
            .chunk("data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n")
            .await;
        assert!(client.answer_event().await.is_some());
        asked.end().await;
        let (status, logged) = program.ended().await;
        assert!(status.success(), "{logged}");
        assert!(logged.contains("drained"), "{logged}");
    }
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let upstream = Upstream::start().await;
    let (mut program, mut client, _asked) = with_call(&upstream, &["--drain=1h"]).await;
    program.signal(Signal::TERM);
    assert!(program.line().contains("a signal"));
    program.signal(Signal::TERM);
    let (status, logged) = program.ended().await;
    assert!(status.success(), "{logged}");
    client.closed().await;
}
