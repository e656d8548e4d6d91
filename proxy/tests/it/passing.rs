//! Requests and responses that are passed through unchanged.

use crate::support::*;

#[tokio::test]
async fn a_request_and_its_response_pass_byte_for_byte() {
    let (upstream, proxy) = Running::start(&[]).await;
    let message = " {\"jsonrpc\":\"2.0\", \"id\":1.0,\"method\":\"x\\u0079\",\"params\":{\"task\":{\"n\":1e2},\"\u{e9}\":\"\\/\"}}\n";
    let request = post(message)
        .header("authorization", "Bearer a")
        .header("mcp-session-id", "s")
        .header("x-twice", "1")
        .header("x-twice", "2");
    let mut client = Connection::sending(proxy.addr, &request).await;

    let received = upstream.next_request().await;

    assert_eq!(received.line, "POST /mcp HTTP/1.1");
    assert_eq!(received.body(), message);
    assert_eq!(received.headers["authorization"], "Bearer a");
    assert_eq!(received.headers["mcp-session-id"], "s");
    assert_eq!(
        received.headers["accept"],
        "application/json, text/event-stream"
    );
    let twice: Vec<_> = received.headers.get_all("x-twice").iter().collect();
    assert_eq!(twice, ["1", "2"]);
    let answer = "{ \"jsonrpc\":\"2.0\",\"id\":1.0,\"result\":{\"n\":1.50}}";
    received
        .answer("200 OK\r\ncontent-type: application/json\r\nx-own: \"a\"\r\nset-cookie: a=1\r\nset-cookie: b=2", answer)
        .await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.text()), (200, answer));
    assert_eq!(reply.headers["x-own"], "\"a\"");
    assert_eq!(reply.headers.get_all("set-cookie").iter().count(), 2);
}

#[tokio::test]
async fn hop_by_hop_headers_do_not_pass_and_the_host_is_the_servers() {
    let headers = ["--header=x-key: secret", "--header=x-key: other"];
    let (upstream, proxy) = Running::start(&headers).await;
    let request = post(&call("1"))
        .header("connection", "x-hop, Keep-Alive")
        .header("x-hop", "1")
        .header("keep-alive", "timeout=5")
        .header("te", "trailers")
        .header("proxy-authorization", "Basic a")
        .header("x-key", "the client's")
        .header("x-forwarded-user", "a");
    let mut client = Connection::sending(proxy.addr, &request).await;

    let received = upstream.next_request().await;

    for name in [
        "x-hop",
        "keep-alive",
        "te",
        "proxy-authorization",
        "connection",
    ] {
        assert!(!received.headers.contains_key(name), "{name}");
    }
    assert_eq!(received.headers["host"], upstream.addr.to_string());
    let keys: Vec<_> = received.headers.get_all("x-key").iter().collect();
    assert_eq!(keys, ["secret", "other"]);
    assert_eq!(received.headers["x-forwarded-user"], "a");
    let head = "200 OK\r\nkeep-alive: timeout=9\r\nproxy-authenticate: Basic\r\nx-left: 1";
    received.answer(head, "{}").await;
    let reply = client.reply().await;
    assert!(!reply.headers.contains_key("keep-alive"));
    assert!(!reply.headers.contains_key("proxy-authenticate"));
    assert_eq!(reply.headers["x-left"], "1");
}

#[tokio::test]
async fn chunked_and_large_bodies_are_passed_through() {
    let (upstream, proxy) = Running::start(&[]).await;
    let large = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"x","params":{{"text":"{}"}}}}"#,
        "a".repeat(4_000_000)
    );
    for chunks in [None, Some([1, 70_000, 100])] {
        let mut client = Connection::open(proxy.addr).await;
        let sending = async {
            match &chunks {
                Some(sizes) => client.send_chunked(&post(&large), sizes).await,
                None => client.send(&post(&large)).await,
            }
        };
        let ((), received) = tokio::join!(sending, upstream.next_request());
        assert!(received.body() == large, "the request");
        let (reply, ()) = tokio::join!(client.reply(), received.answer("200 OK", &large));
        assert!(reply.text() == large, "the response");
    }
}

/// RFC 9112, section 6.3: a length means nothing next to a transfer coding.
#[tokio::test]
async fn a_length_beside_chunks_does_not_cut_the_answer() {
    let (upstream, proxy) = Running::start(&[]).await;
    for order in [
        "content-length: 2\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 2",
    ] {
        let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
        let mut received = upstream.next_request().await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{order}\r\n\r\n");
        received.write(head).await;
        received.chunk("{\"a\":").await;
        received.chunk("1}").await;
        received.end().await;
        assert_eq!(client.reply().await.text(), "{\"a\":1}", "{order}");
    }
}

#[tokio::test]
async fn statuses_pass_unchanged() {
    let (upstream, proxy) = Running::start(&[]).await;
    for head in [
        "202 Accepted",
        "307 Temporary Redirect\r\nlocation: /mcp/",
        "400 Bad Request",
        "401 Unauthorized\r\nwww-authenticate: Bearer resource_metadata=\"http://a/.well-known/oauth-protected-resource\"",
        "404 Not Found",
        "429 Too Many Requests\r\nretry-after: 3",
        "502 Bad Gateway",
    ] {
        let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
        upstream
            .next_request()
            .await
            .answer(head, "sent by the server")
            .await;
        let reply = client.reply().await;
        assert!(head.starts_with(&reply.status.to_string()), "{head}");
        assert_eq!(reply.text(), "sent by the server");
        for header in head.split("\r\n").skip(1) {
            let (name, value) = header.split_once(": ").expect("a header");
            assert_eq!(reply.headers[name], value);
        }
    }
}

#[tokio::test]
async fn events_pass_as_they_arrive() {
    let (upstream, proxy) = Running::start(&["--no-resumable"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &stateless_call("1")).await;
    for event in [
        "id: 1\nretry: 5\ndata: \n\n",
        ": a comment\n\n",
        "data: {\"a\":\ndata: 1}\n\n",
    ] {
        received.chunk(event).await;
        assert_eq!(client.data().await.expect("an event"), event);
    }
    received.end().await;
    assert_eq!(client.data().await, None);
    assert!(client.is_complete());
}

#[tokio::test]
async fn event_streams_are_requested_without_a_content_coding() {
    let upstream = Upstream::start().await;
    for option in [&["--no-resumable"][..], &[]] {
        let proxy = Running::in_front_of(&upstream, option).await;
        let resume = Request::new("GET", "/mcp")
            .header("mcp-session-id", "s")
            .header("accept", "text/event-stream")
            .header("last-event-id", "1");
        let no_stream = Request::new("GET", "/.well-known/oauth-protected-resource")
            .header("accept", "application/json");
        for (request, expected) in [
            (session_call("1"), "identity"),
            (stateless_call("2"), "identity"),
            (resume, "identity"),
            (no_stream, "gzip, br"),
        ] {
            let request = request.header("accept-encoding", "gzip, br");
            let mut client = Connection::sending(proxy.addr, &request).await;
            let received = upstream.next_request().await;
            assert_eq!(
                received.headers["accept-encoding"], expected,
                "{}",
                received.line
            );
            // If the server sends an encoded answer anyway, it is passed through unchanged.
            let head = "200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip";
            received.answer(head, "no gzip").await;
            let reply = client.reply().await;
            assert_eq!(reply.headers["content-encoding"], "gzip");
            assert_eq!(reply.text(), "no gzip");
        }
    }
}

#[tokio::test]
async fn get_delete_and_paths_below_the_endpoint_pass() {
    let (upstream, proxy) = Running::start(&[]).await;
    for (method, path) in [
        ("GET", "/mcp"),
        ("DELETE", "/mcp"),
        ("OPTIONS", "/mcp"),
        ("GET", "/mcp?a=1&b"),
        ("GET", "/mcp/"),
        ("GET", "/mcp/.well-known/openid-configuration"),
        ("GET", "/.well-known/oauth-protected-resource/mcp"),
        ("GET", "/.well-known/oauth-authorization-server"),
    ] {
        let mut client = Connection::sending(proxy.addr, &Request::new(method, path)).await;
        let received = upstream.next_request().await;
        assert_eq!(received.line, format!("{method} {path} HTTP/1.1"));
        received.answer("200 OK", "").await;
        assert_eq!(client.reply().await.status, 200);
    }
}

#[tokio::test]
async fn the_clients_query_is_appended_to_the_upstreams() {
    let upstream = Upstream::start().await;
    let url = format!("http://{}/a/mcp?key=1", upstream.addr);
    let proxy = Running::in_front_of_url(&url, &[]).await;
    for (requested, expected) in [
        ("/a/mcp", "/a/mcp?key=1"),
        ("/a/mcp?b", "/a/mcp?key=1&b"),
        ("/.well-known/x?b", "/.well-known/x?b"),
    ] {
        let mut client = Connection::sending(proxy.addr, &Request::new("GET", requested)).await;
        let received = upstream.next_request().await;
        assert_eq!(received.line, format!("GET {expected} HTTP/1.1"));
        received.answer("200 OK", "").await;
        client.reply().await;
    }
}

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut client = Connection::open(proxy.addr).await;
    for id in ["1", "2", "3"] {
        client.send(&session_call(id)).await;
        let received = upstream.next_request().await;
        assert_eq!(received.body(), call(id));
        received
            .answer("200 OK\r\ncontent-type: application/json", id)
            .await;
        assert_eq!(client.reply().await.text(), id);
    }
}

#[tokio::test]
async fn a_client_that_expects_100_continue_gets_it_from_the_proxy() {
    let (upstream, proxy) = Running::start(&[]).await;
    let message = call("1");
    let request = post("").header("expect", "100-continue");
    let mut client = Connection::open(proxy.addr).await;
    client.send_cut(&request, message.len()).await;
    assert_eq!(client.head().await.status, 100);
    client.write(message.as_bytes()).await;
    let received = upstream.next_request().await;
    assert!(!received.headers.contains_key("expect"));
    assert_eq!(received.body(), message);
    received.answer("200 OK", "{}").await;
    assert_eq!(client.head().await.status, 200);
}

#[tokio::test]
async fn http_2_requests_are_forwarded_too() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut connection = H2::open(proxy.addr).await;
    let mut stream = connection.send(&stateless_call("1")).await;
    let received = upstream.next_request().await;
    assert_eq!(received.body(), call("1"));
    assert_eq!(received.headers["host"], upstream.addr.to_string());
    received
        .answer("200 OK\r\nkeep-alive: timeout=5", "{}")
        .await;
    assert_eq!(stream.head().await.status, 200);
    assert_eq!(stream.body_to_end().await, b"{}");
}

/// HTTP/2 may split a cookie into several fields, but HTTP/1 allows only one (RFC 9113, section 8.2.3).
#[tokio::test]
async fn the_cookie_fields_of_http_2_are_joined_for_the_server() {
    let (upstream, proxy) = Running::start(&[]).await;
    let request = stateless_call("1")
        .header("cookie", "a=1")
        .header("x-twice", "1")
        .header("cookie", "b=\"2\"; c=3")
        .header("x-twice", "2")
        .header("cookie", "d");
    let mut connection = H2::open(proxy.addr).await;
    let mut stream = connection.send(&request).await;
    let received = upstream.next_request().await;
    let cookies: Vec<_> = received.headers.get_all("cookie").iter().collect();
    assert_eq!(cookies, ["a=1; b=\"2\"; c=3; d"]);
    assert_eq!(received.headers.get_all("x-twice").iter().count(), 2);
    received.answer("200 OK", "{}").await;
    assert_eq!(stream.head().await.status, 200);
}

/// nginx keeps an idle connection to the proxy for 60 s, Go's client for 90 s, and HAProxy, Caddy and Envoy for longer.
///
/// A POST that such a client sends while the proxy is closing the connection is lost, because the client must not repeat it.
#[tokio::test]
async fn an_idle_connection_is_not_closed_before_a_server_in_front_closes_it() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
    let answer = "200 OK\r\ncontent-type: application/json";
    upstream.next_request().await.answer(answer, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    tokio::time::pause();
    tokio::time::sleep(std::time::Duration::from_secs(125)).await;
    tokio::time::resume();
    client.send(&session_call("2")).await;
    upstream.next_request().await.answer(answer, "{}").await;
    assert_eq!(client.reply().await.status, 200);
}
