//! Requests that are not let through.

use crate::support::*;

/// Returns the proxy's response to these bytes.
async fn response_to(proxy: &Running, bytes: &str) -> Head {
    let mut client = Connection::open(proxy.addr).await;
    client.write(bytes.as_bytes()).await;
    client.head().await
}

#[tokio::test]
async fn only_requests_for_a_path_pass() {
    let (upstream, proxy) = Running::start(&[]).await;
    for (line, status) in [
        ("CONNECT example.com:443 HTTP/1.1", 405),
        ("GET http://example.com/mcp HTTP/1.1", 400),
        ("GET http://127.0.0.1/mcp HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 400),
        ("GET / HTTP/1.1", 404),
        ("GET /other HTTP/1.1", 404),
        ("GET /mcpother HTTP/1.1", 404),
        ("GET /mcp/../other HTTP/1.1", 404),
        ("GET /.well-known/%2e%2E/other HTTP/1.1", 404),
    ] {
        let head = response_to(&proxy, &format!("{line}\r\nhost: localhost\r\n\r\n")).await;
        assert_eq!(head.status, status, "{line}");
    }
    assert!(!upstream.has_more().await);
}

#[tokio::test]
async fn trace_and_other_methods_do_not_pass_so_no_server_repeats_a_configured_header() {
    let (upstream, proxy) = Running::start(&["--header=x-key: secret"]).await;
    for method in ["TRACE", "PUT", "PATCH", "PROPFIND", "get"] {
        for path in ["/mcp", "/.well-known/x"] {
            let request = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
            let head = response_to(&proxy, &request).await;
            assert_eq!(head.status, 405, "{method} {path}");
            assert_eq!(head.headers["allow"], "GET, POST, DELETE, OPTIONS, HEAD");
        }
    }
    assert!(!upstream.has_more().await);
}

#[tokio::test]
async fn only_requests_for_this_host_pass() {
    let hosts = "--allow-host=mcp.example.com,other:81,tls:443,[2001:db8:0::1]:80";
    let options = [hosts];
    let (_upstream, proxy) = Running::start(&options).await;
    for (hosts, status) in [
        ("", 400),
        ("host: localhost\r\nhost: localhost\r\n", 400),
        ("host: a@localhost\r\n", 400),
        ("host: example.com\r\n", 403),
        ("host: localhost.example.com\r\n", 403),
        ("host: 127.0.0.1.example.com\r\n", 403),
        ("host: 192.0.2.1\r\n", 403),
        ("host: a.mcp.example.com\r\n", 403),
        ("host: other\r\n", 403),
        ("host: other:82\r\n", 403),
        ("host: tls:80\r\n", 403),
        ("host: tls\r\n", 404),
        ("host: tls:443\r\n", 404),
        ("host: [2001:db8::1]\r\n", 404),
        ("host: localhost\r\n", 404),
        ("host: LocalHost:1\r\n", 404),
        ("host: 127.0.0.1:8000\r\n", 404),
        ("host: [::1]:8000\r\n", 404),
        ("host: MCP.example.com:8443\r\n", 404),
        ("host: other:81\r\n", 404),
    ] {
        let head = response_to(&proxy, &format!("GET /other HTTP/1.1\r\n{hosts}\r\n")).await;
        assert_eq!(head.status, status, "{hosts:?}");
    }
}

#[tokio::test]
async fn only_pages_of_this_host_or_of_allowed_origins_may_call() {
    let options = ["--allow-origin=https://app.example.com, https://plain.example.com:443"];
    let (_upstream, proxy) = Running::start(&options).await;
    for (origins, status) in [
        ("", 404),
        ("origin: http://localhost:6274\r\n", 404),
        ("origin: http://127.0.0.1\r\n", 404),
        ("origin: https://app.example.com\r\n", 404),
        ("origin: null\r\n", 403),
        ("origin: http://app.example.com\r\n", 403),
        ("origin: https://app.example.com:444\r\n", 403),
        ("origin: https://evil.example\r\n", 403),
        ("origin: http://localhost.evil.example\r\n", 403),
        (
            "origin: http://localhost\r\norigin: https://evil.example\r\n",
            403,
        ),
        ("origin: evil://localhost\r\n", 403),
        ("origin: vscode-webview://127.0.0.1\r\n", 403),
        ("origin: https://app.example.com:443\r\n", 404),
        ("origin: https://plain.example.com\r\n", 404),
        ("origin: \r\n", 403),
    ] {
        let request = format!("GET /other HTTP/1.1\r\nhost: localhost\r\n{origins}\r\n");
        assert_eq!(
            response_to(&proxy, &request).await.status,
            status,
            "{origins:?}"
        );
    }
}

/// Sends a body that is one byte too long, without announcing its length.
async fn send_too_large(proxy: &Running) -> Reply {
    let mut client = Connection::open(proxy.addr).await;
    client.send_chunked_head(&post("")).await;
    let chunk = vec![b' '; 1 << 20];
    for _ in 0..4 {
        client.chunk(&chunk).await;
    }
    client.chunk(b"1").await;
    client.reply().await
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused() {
    let (upstream, proxy) = Running::start(&[]).await;
    let announced = "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4194305\r\n\r\n";
    assert_eq!(response_to(&proxy, announced).await.status, 413);
    assert!(!upstream.has_more().await);

    let reply = send_too_large(&proxy).await;
    assert_eq!(reply.status, 413);
    assert_eq!(
        reply.json()["error"]["message"],
        "the request is larger than this proxy accepts"
    );
}

/// If the connection were reset, a client that sends its whole body first would lose the answer.
#[tokio::test]
async fn a_body_that_is_too_large_may_be_sent_in_full() {
    let (_upstream, proxy) = Running::start(&[]).await;
    let large = post(&" ".repeat(20 << 20));
    for _ in 0..10 {
        let mut client = Connection::sending(proxy.addr, &large).await;
        assert_eq!(client.reply().await.status, 413);
    }
}

/// The length is not announced, which HTTP/2 allows.
#[tokio::test]
async fn a_body_that_is_too_large_for_a_command_is_refused_in_the_same_way() {
    let proxy = Running::in_front_of_command(&[]).await;
    assert_eq!(send_too_large(&proxy).await.status, 413);
}

#[tokio::test(start_paused = true)]
async fn a_stalled_body_is_answered_with_408_after_30_s() {
    let command = Running::in_front_of_command(&[]).await;
    let upstream = Running::in_front_of(&Upstream::start().await, &[]).await;
    for proxy in [command, upstream] {
        let mut client = Connection::open(proxy.addr).await;
        client.send_cut(&session_call("1"), 1_000).await;
        let started_at = tokio::time::Instant::now();
        assert_eq!(client.head().await.status, 408);
        let waited = started_at.elapsed().as_secs();
        assert!((30..=35).contains(&waited), "{waited} s");
        client.body_to_end().await;
        client.closed().await;
    }
}

#[tokio::test]
async fn all_bodies_that_are_being_received_have_64_mib_together() {
    const BODY: usize = 4 * 1024 * 1024;
    let proxy = Running::in_front_of_command(&[]).await;
    let large = post(&"x".repeat(BODY - 1));
    let mut open = Vec::new();
    for _ in 0..16 {
        let mut client = Connection::open(proxy.addr).await;
        client.send_cut(&large, BODY).await;
        open.push(client);
    }
    // Sixteen of these bodies, each one byte short, take up all but 16 bytes of the 64 MiB.
    let refused = async {
        loop {
            let mut late = Connection::open(proxy.addr).await;
            late.send_chunked(&post(&" ".repeat(100_000)), &[]).await;
            let reply = late.reply().await;
            if reply.status == 503 {
                return reply;
            }
        }
    };
    let reply = within("a request without room", refused).await;
    assert_eq!(reply.headers["retry-after"], "1");
    assert!(
        reply.text().contains("too many requests at once"),
        "{}",
        reply.text()
    );
    drop(open);
    let served = async {
        while response_to(&proxy, "POST /mcp HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n{").await.status != 400 {}
    };
    within("room for a request again", served).await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    let (_upstream, proxy) = Running::start(&[]).await;
    let head = |length| {
        let long = "a".repeat(length);
        format!("GET /other HTTP/1.1\r\nhost: localhost\r\nx-long: {long}\r\n\r\n")
    };
    assert_eq!(response_to(&proxy, &head(60_000)).await.status, 404);
    assert_eq!(response_to(&proxy, &head(66_000)).await.status, 431);
    let fields: String = (0..101).map(|n| format!("x-{n}: 1\r\n")).collect();
    let many = format!("GET /other HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n");
    assert_eq!(response_to(&proxy, &many).await.status, 431);
}

#[tokio::test(start_paused = true)]
async fn a_connection_whose_head_does_not_arrive_is_closed() {
    let proxy = Running::in_front_of_url("http://127.0.0.1:1/mcp", &[]).await;
    for started in ["", "P", "GET /mcp HTTP/1.1\r\nhost: loc"] {
        let mut client = Connection::open(proxy.addr).await;
        client.write(started.as_bytes()).await;
        let started_at = tokio::time::Instant::now();
        client.closed().await;
        let waited = started_at.elapsed().as_secs();
        assert!((9..=21).contains(&waited), "{started:?}: {waited} s");
    }
}

#[tokio::test]
async fn bodies_that_are_not_messages_pass_to_the_server() {
    let (upstream, proxy) = Running::start(&[]).await;
    for body in [&b"{"[..], b"\xff\xfe", b"[]", b""] {
        let request = post("").body(body.to_vec());
        let mut client = Connection::sending(proxy.addr, &request).await;
        let received = upstream.next_request().await;
        assert_eq!(received.body, body);
        received.answer("400 Bad Request", "no").await;
        assert_eq!(client.reply().await.status, 400);
    }
}
