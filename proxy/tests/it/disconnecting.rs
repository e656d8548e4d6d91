//! What disconnects do to the server.

use std::time::Duration;

use tokio::time::Instant;

use serde_json::Value;

use crate::support::*;

/// Accepts the server's next request, which must be a cancellation, and returns the id that it cancels.
async fn cancel_of(upstream: &Upstream) -> Value {
    let cancel = upstream.next_request().await;
    let message: Value = serde_json::from_str(cancel.body()).expect("JSON");
    assert_eq!(message["method"], "notifications/cancelled");
    assert_eq!(cancel.headers["mcp-session-id"], "s");
    assert_eq!(cancel.headers["host"], upstream.addr.to_string());
    cancel.answer("202 Accepted", "").await;
    message["params"]["requestId"].clone()
}

/// Asserts that the server sees the connection end, but no cancellation.
async fn assert_only_closed(upstream: &Upstream, proxy: &Running, mut received: ReceivedRequest) {
    received.closed().await;
    proxy.calls_reach(0).await;
    assert!(!upstream.has_more().await, "nothing must be injected");
}

#[tokio::test]
async fn a_stateless_call_without_a_head_is_closed_at_the_server() {
    let (upstream, proxy) = Running::start(&[]).await;
    let client = Connection::sending(proxy.addr, &stateless_call("1")).await;
    let received = upstream.next_request().await;
    client.fin();
    assert_only_closed(&upstream, &proxy, received).await;
}

#[tokio::test]
async fn a_stateless_call_with_a_stream_is_closed_at_the_server() {
    let (upstream, proxy) = Running::start(&[]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &stateless_call("1")).await;
    received.chunk("data: 1\n\n").await;
    client.event().await.expect("an event");
    client.rst();
    assert_only_closed(&upstream, &proxy, received).await;
}

#[tokio::test]
async fn an_http_2_stream_that_is_reset_is_closed_at_the_server() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut connection = H2::open(proxy.addr).await;
    let abandoned = connection.send(&stateless_call("1")).await;
    let mut received = upstream.next_request().await;
    let mut open = connection.send(&stateless_call("2")).await;
    let other = upstream.next_request().await;
    abandoned.reset();
    received.closed().await;
    other.answer("200 OK", "{}").await;
    assert_eq!(open.head().await.status, 200);
}

#[tokio::test]
async fn a_session_call_without_a_head_is_cancelled() {
    let (upstream, proxy) = Running::start(&["--no-resumable"]).await;
    let client = Connection::sending(proxy.addr, &session_call("1")).await;
    let mut received = upstream.next_request().await;
    client.fin();
    assert_eq!(cancel_of(&upstream).await, 1);
    received.closed().await;
}

#[tokio::test]
async fn a_session_call_with_event_ids_is_cancelled_after_its_grace() {
    let (upstream, proxy) = Running::start(&["--no-resumable", "--grace=100ms"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &session_call("\"a\"")).await;
    received.chunk("id: x\ndata: \n\n").await;
    client.event().await.expect("an event");
    client.fin();
    received.closed().await;
    assert_eq!(cancel_of(&upstream).await, "a");
    proxy.calls_reach(0).await;
}

#[tokio::test]
async fn an_exempt_tool_and_one_with_its_own_grace_keep_running() {
    for option in ["--exempt=work", "--tool-grace=work=always=1h"] {
        let (upstream, proxy) =
            Running::start(&["--no-resumable", "--grace=immediate", option]).await;
        let (client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;
        client.fin();
        received.closed().await;
        while proxy.calls.detached() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(proxy.calls.len(), 1, "{option}");
        assert!(!upstream.has_more().await, "{option}");
    }
}

/// The client is still connected and gets an error.
#[tokio::test]
async fn a_session_call_whose_stream_is_cut_is_cancelled_unless_a_disconnect_does_not_cancel_it() {
    for (option, is_cancelled) in [
        ("--grace=auto", true),
        ("--tool-grace=work=always=1h", true),
        ("--tool-grace=work=never", false),
        ("--exempt=work", false),
    ] {
        let (upstream, proxy) = Running::start(&[option]).await;
        let (mut client, received) = proxy.streaming(&upstream, &session_call("1")).await;
        drop(received);
        assert_eq!(
            client.answer().await.expect("an error")["error"]["code"],
            -32603
        );
        if is_cancelled {
            assert_eq!(cancel_of(&upstream).await, 1, "{option}");
        }
        proxy.calls_reach(0).await;
        assert!(!upstream.has_more().await, "{option}");
    }
}

/// To a server without sessions, a closed connection is the cancellation.
#[tokio::test]
async fn an_exempt_call_without_a_session_keeps_its_connection_to_the_end() {
    for option in ["--exempt=work", "--tool-grace=work=never", "--grace=never"] {
        for has_head in [false, true] {
            let (upstream, proxy) = Running::start(&[option]).await;
            let mut client = Connection::sending(proxy.addr, &stateless_call("1")).await;
            let mut received = upstream.next_request().await;
            if has_head {
                received.stream().await;
                client.head().await;
            }
            client.fin();
            // Waits until the layer has detached the call, or ended it if it has no head.
            while proxy.calls.len() > proxy.calls.detached() {
                tokio::task::yield_now().await;
            }
            if !has_head {
                received.stream().await;
            }
            received.answer_at_length().await;
            proxy.calls_reach(0).await;
        }
    }
}

/// Each of these requests may be a call of the tool, which the layer cannot tell.
#[tokio::test]
async fn a_request_that_may_be_an_exempt_call_without_a_session_keeps_its_connection_as_well() {
    let without_version = call("1").replace(r#""jsonrpc":"2.0","#, "");
    let with_two_ids = call("1").replace(r#""id":1"#, r#""id":1,"id":1"#);
    let with_two_names = call("1").replace(r#""name":"work""#, r#""name":"work","name":"work""#);
    let requests = [
        post(&format!("[{}]", call("1"))),
        post(&without_version),
        post(&with_two_ids),
        post(&with_two_names),
        post("compressed").header("content-encoding", "gzip"),
    ];
    for option in ["--exempt=work", "--grace=never"] {
        let (upstream, proxy) = Running::start(&[option]).await;
        for request in &requests {
            let (client, received) = proxy.streaming(&upstream, request).await;
            client.fin();
            received.answer_at_length().await;
        }
    }
}

#[tokio::test]
async fn the_answer_of_an_exempt_call_without_a_session_is_unchanged() {
    let (upstream, proxy) = Running::start(&["--exempt=work"]).await;
    let mut client = Connection::sending(proxy.addr, &stateless_call("1")).await;
    let received = upstream.next_request().await;
    assert!(received.body().contains("work"), "{}", received.body());
    received.answer("200 OK", "{}").await;
    let reply = client.reply().await;
    assert_eq!((reply.status, &*reply.body), (200, &b"{}"[..]));
    proxy.calls_reach(0).await;
}

#[tokio::test]
async fn a_tool_beside_an_exempt_one_ends_with_its_connection() {
    let (upstream, proxy) = Running::start(&["--exempt=other"]).await;
    for request in [stateless_call("1"), post(&format!("[{}]", call("1")))] {
        let client = Connection::sending(proxy.addr, &request).await;
        let mut received = upstream.next_request().await;
        client.fin();
        received.closed().await;
        proxy.calls_reach(0).await;
    }
}

#[tokio::test]
async fn a_timeout_closes_the_connection_of_an_exempt_call() {
    let options = ["--exempt=work", "--call-timeout=1s"];
    let (upstream, proxy) = Running::start(&options).await;
    let mut client = Connection::open(proxy.addr).await;
    let started = Instant::now();
    client.send(&stateless_call("1")).await;
    let mut received = upstream.next_request().await;
    client.fin();
    received.closed().await;
    assert!(started.elapsed() >= Duration::from_secs(1));
    proxy.calls_reach(0).await;
}

/// A time applies only to clients that can resume, and a call without event ids cannot be resumed.
#[tokio::test]
async fn a_timed_grace_keeps_only_resumable_calls_and_always_keeps_every_call() {
    for (grace, is_kept) in [("--grace=1h", false), ("--grace=always=1h", true)] {
        let (upstream, proxy) = Running::start(&["--no-resumable", grace]).await;
        let (client, mut received) = proxy.streaming(&upstream, &session_call("1")).await;
        client.fin();
        received.closed().await;
        if is_kept {
            while proxy.calls.detached() == 0 {
                tokio::task::yield_now().await;
            }
        } else {
            assert_eq!(cancel_of(&upstream).await, 1);
        }
        proxy.calls_reach(usize::from(is_kept)).await;
    }
}

#[tokio::test]
async fn the_reconnect_delay_is_a_quarter_of_the_grace() {
    let initialize = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    for (options, retry) in [
        (&[][..], "retry: 3000\n"),
        (&["--grace=1h"], "retry: 3000\n"),
        (&["--grace=4s"], "retry: 1000\n"),
        (&["--grace=always=2s"], "retry: 500\n"),
        (
            &["--grace=immediate", "--tool-grace=other=6s"],
            "retry: 1500\n",
        ),
    ] {
        let (upstream, proxy) = Running::start(options).await;
        let mut client = Connection::sending(proxy.addr, &post(initialize)).await;
        let head = "200 OK\r\nmcp-session-id: s\r\ncontent-type: application/json";
        upstream.next_request().await.answer(head, "{}").await;
        client.reply().await;
        let (mut client, _received) = proxy.streaming(&upstream, &session_call("1")).await;
        let first = client.data().await.expect("an event");
        assert!(
            first.starts_with(retry.as_bytes()),
            "{options:?}: {first:?}"
        );
    }
}

/// JavaScript reads 9007199254740993 as 9007199254740992, which may be another call's id.
#[tokio::test]
async fn a_call_with_an_ambiguous_id_keeps_running_and_others_are_cancelled() {
    for options in [
        &["--grace=immediate"][..],
        &["--grace=immediate", "--no-resumable"],
    ] {
        let (upstream, proxy) = Running::start(options).await;
        let (mut clients, mut requests) = (Vec::new(), Vec::new());
        for id in ["9007199254740993", "-9007199254740992", "9007199254740991"] {
            let (client, received) = proxy.streaming(&upstream, &session_call(id)).await;
            clients.push(client);
            requests.push(received);
        }
        for client in clients {
            client.fin();
        }
        assert_eq!(cancel_of(&upstream).await, 9_007_199_254_740_991_u64);
        while proxy.calls.detached() < 2 {
            tokio::task::yield_now().await;
        }
        assert!(!upstream.has_more().await, "{options:?}");
    }
}

#[tokio::test]
async fn a_call_that_exceeds_its_timeout_is_cancelled_with_an_error_to_its_client() {
    let (upstream, proxy) = Running::start(&["--no-resumable", "--call-timeout=100ms"]).await;
    let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
    let _received = upstream.next_request().await;
    let reply = client.reply().await.json();
    assert_eq!(
        (&reply["id"], &reply["error"]["code"]),
        (&1.into(), &(-32001).into())
    );
    assert_eq!(cancel_of(&upstream).await, 1);
}

#[tokio::test]
async fn a_client_of_a_silent_server_gets_an_event_stream() {
    let options = [
        "--no-resumable",
        "--commit-after=250ms",
        "--keep-alive=100ms",
    ];
    let (upstream, proxy) = Running::start(&options).await;
    let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
    let received = upstream.next_request().await;
    assert!(client.head().await.is_event_stream());
    assert!(
        matches!(client.item().await, Some(SseItem::Comment(_))),
        "a probe"
    );
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received
        .answer("200 OK\r\ncontent-type: application/json", answer)
        .await;
    assert_eq!(client.event().await.expect("the answer").data, answer);
}

/// The server refuses the cancellation because it is overloaded, and then closes the connection for the next one.
#[tokio::test]
async fn a_cancel_that_the_server_refuses_temporarily_is_sent_again() {
    for options in [&[][..], &["--no-resumable"]] {
        let (upstream, proxy) = Running::start(options).await;
        let client = Connection::sending(proxy.addr, &session_call("1")).await;
        let _received = upstream.next_request().await;
        client.fin();
        upstream
            .next_request()
            .await
            .answer("503 Service Unavailable", "")
            .await;
        drop(upstream.next_request().await);
        assert_eq!(cancel_of(&upstream).await, 1, "{options:?}");
    }
}

#[tokio::test]
async fn a_cancel_that_the_server_refuses_is_sent_once() {
    let (upstream, proxy) = Running::start(&["--no-resumable"]).await;
    let client = Connection::sending(proxy.addr, &session_call("1")).await;
    let _received = upstream.next_request().await;
    client.fin();
    upstream
        .next_request()
        .await
        .answer("401 Unauthorized", "")
        .await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert!(!upstream.has_more().await);
}

/// Its call is cancelled by closing the connection.
#[tokio::test]
async fn a_call_without_a_session_shows_no_grace() {
    for option in ["--grace=1h", "--tool-grace=work=1h"] {
        for is_older in [true, false] {
            let (upstream, proxy) = Running::start(&[option]).await;
            let mut client = Connection::open(proxy.addr).await;
            let request = if is_older {
                post(&call("1")).header("mcp-protocol-version", "2025-11-25")
            } else {
                // Requests in this revision have no session.
                stateless_call("1").header("mcp-session-id", "s")
            };
            client.send(&request).await;
            let mut received = upstream.next_request().await;
            received.stream().await;
            received.chunk("data: 1\n\n").await;
            client.head().await;
            client.event().await.expect("an event");
            client.fin();
            received.closed().await;
            proxy.calls_reach(0).await;
        }
    }
}

/// The client does not read for more than 30 s, after which the kernel used to close such a connection.
#[tokio::test]
#[ignore = "takes 35 s"]
async fn a_client_that_does_not_read_stays_connected_within_the_stall_timeout() {
    let options = [["--stall-timeout", "off"], ["--stall-timeout", "10m"]];
    let waits = options.map(async |options| {
        let (upstream, proxy) = Running::start(&options).await;
        let mut client = Connection::sending(proxy.addr, &stateless_call("1")).await;
        let mut received = upstream.next_request().await;
        received.stream().await;
        // More than fits into the client's receive buffer and the proxy's send buffer.
        let event = format!("data: {}\n\n", "x".repeat(1 << 20));
        let (client, ()) = tokio::join!(
            async {
                tokio::time::sleep(std::time::Duration::from_secs(35)).await;
                proxy.calls_reach(1).await;
                client.head().await;
                client.event().await.expect("the event");
                client
            },
            received.chunk(&event)
        );
        let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
        received.chunk(&format!("data: {answer}\n\n")).await;
        received.end().await;
        let mut client = client;
        assert_eq!(client.answer().await.expect("the answer")["id"], 1);
    });
    futures_util::future::join_all(waits).await;
}
