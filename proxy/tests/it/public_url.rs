//! What the server learns about its clients' connections, and which URL the clients see.
//!
//! The options are `--public-url` and `--trust-forwarded`.

use crate::support::*;

const METADATA: &str = "/.well-known/oauth-protected-resource/mcp";
const OPTIONS: [&str; 1] = ["--public-url=https://mcp.example.com"];

/// Adds the headers that a reverse proxy or an impostor sends.
fn forwarded(request: Request) -> Request {
    request
        .header("x-forwarded-for", "192.0.2.1, [2001:db8::1]:5000")
        .header("x-forwarded-host", "mcp.example.com")
        .header("x-forwarded-proto", "https")
        .header("x-forwarded-prefix", "/a")
        .header("x-forwarded-user", "someone")
}

/// Sends a request, and returns what the server has received and the client's reply.
///
/// The array holds the values of `X-Forwarded-For`, `-Host` and `-Proto`, and of `Forwarded`.
async fn exchange(
    upstream: &Upstream,
    proxy: &Running,
    request: &Request,
    head: &str,
    body: &str,
) -> ([String; 4], Reply) {
    let mut client = Connection::sending(proxy.addr, request).await;
    let received = upstream.next_request().await;
    let names = [
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "forwarded",
    ];
    let seen = names.map(|name| {
        let values: Vec<&str> = received
            .headers
            .get_all(name)
            .iter()
            .map(|value| value.to_str().expect("text"))
            .collect();
        values.join(" | ")
    });
    received.answer(head, body).await;
    (seen, client.reply().await)
}

#[tokio::test]
async fn the_server_gets_the_address_of_the_client_and_the_host_that_it_used() {
    let (upstream, proxy) = Running::start(&[]).await;
    let address = proxy.addr.to_string();
    for request in [
        session_call("1"),
        forwarded(session_call("1")).header("forwarded", "for=x"),
    ] {
        let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
        let forwarded = format!("for=127.0.0.1;host=\"{address}\";proto=http");
        assert_eq!(
            seen,
            ["127.0.0.1", &address, "http", &forwarded],
            "an impostor"
        );
    }
    let public = Running::in_front_of(&upstream, &OPTIONS).await;
    let (seen, _) = exchange(&upstream, &public, &session_call("1"), "200 OK", "").await;
    let forwarded = "for=127.0.0.1;host=\"mcp.example.com\";proto=https";
    assert_eq!(seen, ["127.0.0.1", "mcp.example.com", "https", forwarded]);
}

#[tokio::test]
async fn only_headers_about_the_connection_are_removed() {
    let (upstream, proxy) = Running::start(&[]).await;
    let _client = Connection::sending(proxy.addr, &forwarded(session_call("1"))).await;
    let received = upstream.next_request().await;
    assert!(!received.headers.contains_key("x-forwarded-prefix"));
    assert_eq!(
        received.headers["x-forwarded-user"], "someone",
        "headers about the user are passed through"
    );
}

#[tokio::test]
async fn the_headers_of_a_trusted_proxy_count() {
    let trust = [
        "--trust-forwarded=10.0.0.0/8,127.0.0.0/8",
        "--allow-host=mcp.example.com",
    ];
    let (upstream, proxy) = Running::start(&trust).await;
    let request = forwarded(session_call("1"));
    let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
    let chain = "192.0.2.1, [2001:db8::1]:5000, 127.0.0.1";
    let forwarded_field =
        "for=192.0.2.1;host=\"mcp.example.com\";proto=https, for=\"[2001:db8::1]\", for=127.0.0.1";
    assert_eq!(seen, [chain, "mcp.example.com", "https", forwarded_field]);

    let request = session_call("1").header("forwarded", "for=192.0.2.1;proto=https");
    let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
    assert_eq!(seen[3], "for=192.0.2.1;proto=https, for=127.0.0.1");

    let other = [
        "--trust-forwarded=10.0.0.0/8",
        "--allow-host=mcp.example.com",
    ];
    let other = Running::in_front_of(&upstream, &other).await;
    let request = forwarded(session_call("1")).header("forwarded", "for=192.0.2.1;proto=https");
    let (seen, _) = exchange(&upstream, &other, &request, "200 OK", "").await;
    assert_eq!(
        seen[0], "127.0.0.1",
        "the address is not in a trusted network"
    );
    assert_eq!(seen[2], "http");
}

#[tokio::test]
async fn a_host_that_clients_may_not_use_is_not_forwarded() {
    let (upstream, proxy) = Running::start(&["--trust-forwarded=127.0.0.1"]).await;
    for host in [
        "evil.example",
        "a@localhost",
        "mcp.example.com, evil.example",
    ] {
        let request = session_call("1").header("x-forwarded-host", host);
        let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
        assert_eq!(seen[1], proxy.addr.to_string(), "{host}");
    }
}

#[tokio::test]
async fn a_refusal_names_the_metadata_at_the_public_url() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let head = format!(
        "401 Unauthorized\r\nwww-authenticate: Bearer error=\"invalid_token\", resource_metadata=\"http://{addr}{METADATA}\""
    );
    let trust = [
        "--trust-forwarded=127.0.0.1",
        "--allow-host=mcp.example.com",
    ];
    for (options, expected) in [
        (&OPTIONS[..], "https://mcp.example.com".to_owned()),
        (&trust[..], "https://mcp.example.com".to_owned()),
        (&[][..], format!("http://{addr}")),
        (
            &["--public-url=http://localhost:8000/mcp"][..],
            "http://localhost:8000".to_owned(),
        ),
    ] {
        let proxy = Running::in_front_of(&upstream, options).await;
        let request = forwarded(session_call("1"));
        let (_, reply) = exchange(&upstream, &proxy, &request, &head, "").await;
        assert_eq!(reply.status, 401);
        assert_eq!(
            reply.headers["www-authenticate"],
            format!("Bearer error=\"invalid_token\", resource_metadata=\"{expected}{METADATA}\"")
        );
    }
}

#[tokio::test]
async fn the_metadata_names_the_public_url_and_nothing_else_changes() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let proxy = Running::in_front_of(&upstream, &OPTIONS).await;
    let head = "200 OK\r\ncontent-type: application/json\r\netag: \"1\"\r\nx-other: 1";
    for path in [METADATA, "/.well-known/oauth-protected-resource"] {
        let body = |origin: &str| {
            format!(
                r#"{{ "authorization_servers":["http://{addr}"], "resource" : "{origin}/mcp"}}"#
            )
        };
        let request = Request::new("GET", path).header("accept-encoding", "gzip");
        let upstream_url = format!("http://{addr}");
        let (_, reply) = exchange(&upstream, &proxy, &request, head, &body(&upstream_url)).await;
        assert_eq!(reply.text(), body("https://mcp.example.com"));
        assert_eq!(reply.headers["x-other"], "1");
        assert!(!reply.headers.contains_key("etag"), "the body has changed");
        let elsewhere = body("https://other.example");
        let (_, reply) = exchange(&upstream, &proxy, &request, head, &elsewhere).await;
        assert_eq!(
            (reply.text(), &reply.headers["etag"]),
            (&*elsewhere, &"\"1\"".parse().unwrap())
        );
    }
    // For another path, status or type, the body is passed through unchanged.
    let body = format!(r#"{{"resource":"http://{addr}/mcp"}}"#);
    for (path, head) in [
        ("/.well-known/oauth-protected-resources", head),
        ("/.well-known/oauth-authorization-server", head),
        ("/mcp", head),
        (METADATA, "404 Not Found\r\ncontent-type: application/json"),
        (METADATA, "200 OK\r\ncontent-type: text/plain"),
    ] {
        let request = Request::new("GET", path);
        let (_, reply) = exchange(&upstream, &proxy, &request, head, &body).await;
        assert_eq!(reply.text(), body, "{path} {head}");
    }
}

#[tokio::test]
async fn large_or_compressed_metadata_is_passed_through_unchanged() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let proxy = Running::in_front_of(&upstream, &OPTIONS).await;
    let plain = "200 OK\r\ncontent-type: application/json";
    let coded = format!("{plain}\r\ncontent-encoding: br");
    let body = format!(r#"{{"resource":"http://{addr}/mcp"}}"#);
    let large = format!("{body}{}", " ".repeat(64 * 1024));
    for (head, body) in [(plain, &large), (&*coded, &body)] {
        let request = Request::new("GET", METADATA);
        let (_, reply) = exchange(&upstream, &proxy, &request, head, body).await;
        assert_eq!(reply.text(), *body);
    }
}

#[tokio::test]
async fn a_redirect_to_the_public_url_leads_to_the_proxy() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let public = Running::in_front_of(&upstream, &OPTIONS).await;
    let bare = Running::in_front_of(&upstream, &[]).await;
    for location in [
        "https://mcp.example.com/mcp/".to_owned(),
        format!("https://{addr}/mcp/"),
        format!("http://{addr}/mcp/"),
    ] {
        let head = format!("307 Temporary Redirect\r\nlocation: {location}");
        let (_, reply) = exchange(&upstream, &public, &session_call("1"), &head, "").await;
        assert_eq!(
            (reply.status, &reply.headers["location"]),
            (307, &"/mcp/".parse().unwrap())
        );
        let (_, reply) = exchange(&upstream, &bare, &session_call("1"), &head, "").await;
        assert_eq!(
            reply.status == 307,
            location.starts_with("http:"),
            "{location}"
        );
    }
    let head = "307 Temporary Redirect\r\nlocation: https://other.example/mcp/";
    let (_, reply) = exchange(&upstream, &public, &session_call("1"), head, "").await;
    assert_eq!(reply.status, 502);
}

#[tokio::test]
async fn a_cancel_sent_by_the_layer_has_the_same_headers() {
    let upstream = Upstream::start().await;
    let proxy = Running::in_front_of(
        &upstream,
        &["--public-url=https://mcp.example.com", "--grace=immediate"],
    )
    .await;
    let (client, received) = proxy.streaming(&upstream, &session_call("1")).await;
    drop(client);
    let cancel = upstream.next_request().await;
    assert!(cancel.body().contains("notifications/cancelled"));
    for name in [
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    ] {
        let values = |received: &ReceivedRequest| {
            received
                .headers
                .get_all(name)
                .iter()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(values(&cancel), values(&received), "{name}");
        assert_eq!(values(&cancel).len(), 1, "{name}");
    }
}

/// On Linux all addresses in 127.0.0.0/8 are loopback addresses.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_client_that_changes_its_address_resumes_without_the_server() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let (upstream, proxy) = Running::start(&[]).await;
    let (mut client, _received) = proxy.streaming(&upstream, &session_call("1")).await;
    let first = client.event().await.expect("an event").id.expect("an id");
    drop(client);

    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 2], 0).into()).expect("an address");
    let mut stream = socket.connect(proxy.addr).await.expect("a connection");
    let resume = format!(
        "GET /mcp HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\nmcp-protocol-version: 2025-11-25\r\nmcp-session-id: s\r\nlast-event-id: {first}\r\n\r\n"
    );
    stream
        .write_all(resume.as_bytes())
        .await
        .expect("the proxy is reading");
    let mut head = [0; 15];
    within("the response", stream.read_exact(&mut head))
        .await
        .expect("a head");
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    assert!(!upstream.has_more().await, "no ping");
}

/// Otherwise the server might refuse the request, for example because it accepts only https.
#[tokio::test]
async fn the_request_for_the_rest_of_an_answer_has_the_same_headers() {
    let (upstream, proxy) = Running::start(&OPTIONS).await;
    let _client = Connection::sending(proxy.addr, &session_call("1")).await;
    let mut received = upstream.next_request().await;
    let call = received.headers.clone();
    received.stream().await;
    received.chunk("id: 5\nretry: 250\ndata:\n\n").await;
    received.end().await;
    let rest = upstream.next_request().await;
    assert_eq!(rest.headers["last-event-id"], "5");
    for name in [
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    ] {
        assert_eq!(rest.headers.get(name), call.get(name), "{name}");
    }
}

/// CGI, WSGI, Rack and PHP read `X_Forwarded_For` as `X-Forwarded-For` (CVE-2024-45614).
#[tokio::test]
async fn an_impostor_cannot_write_the_headers_with_underscores() {
    let (upstream, proxy) = Running::start(&OPTIONS).await;
    let mut client = Connection::open(proxy.addr).await;
    let names = ["x_forwarded_for", "x-forwarded_host", "x_forwarded-proto"];
    let request = names
        .iter()
        .fold(session_call("1"), |request, name| request.header(name, "x"));
    client.send(&request).await;
    let received = upstream.next_request().await;
    for name in names {
        assert!(!received.headers.contains_key(name), "{name}");
    }
}

/// gunicorn answers 400 if these contradict `X-Forwarded-Proto`, and trusts them if it is missing.
///
/// chi prefers `X-Real-IP`.
#[tokio::test]
async fn an_impostor_cannot_write_the_other_headers_about_the_connection() {
    let (upstream, proxy) = Running::start(&[]).await;
    let mut client = Connection::open(proxy.addr).await;
    let headers = [
        ("x-forwarded-ssl", "on"),
        ("x-forwarded-protocol", "ssl"),
        ("x-real-ip", "192.0.2.1"),
    ];
    let request = headers
        .iter()
        .fold(session_call("1"), |request, (name, value)| {
            request.header(name, value)
        });
    client.send(&request).await;
    let received = upstream.next_request().await;
    for (name, _) in headers {
        assert!(!received.headers.contains_key(name), "{name}");
    }
}

/// The second of two proxies may append to the first one's list, as Apache does with `X-Forwarded-Host`.
#[tokio::test]
async fn the_first_of_several_proxies_names_the_public_url() {
    let trust = [
        "--trust-forwarded=127.0.0.1",
        "--allow-host=mcp.example.com",
    ];
    let (upstream, proxy) = Running::start(&trust).await;
    for (host, proto) in [
        ("mcp.example.com", "https, http"),
        ("mcp.example.com, 127.0.0.1:8080", "https"),
    ] {
        let request = session_call("1")
            .header("x-forwarded-host", host)
            .header("x-forwarded-proto", proto);
        let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
        assert_eq!(seen[1..3], ["mcp.example.com", "https"], "{host} {proto}");
    }
}

/// A reverse proxy reports the client's new address.
#[tokio::test]
async fn a_client_behind_a_trusted_proxy_that_changes_its_address_resumes_without_the_server() {
    let (upstream, proxy) = Running::start(&["--trust-forwarded=127.0.0.1"]).await;
    let mut client = Connection::open(proxy.addr).await;
    let call = session_call("1").header("x-forwarded-for", "192.0.2.1");
    client.send(&call).await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    client.head().await;
    let first = client.event().await.expect("an event").id.expect("an id");
    drop(client);

    let mut client = Connection::open(proxy.addr).await;
    let resume = Request::new("GET", "/mcp")
        .header("accept", "text/event-stream")
        .header("mcp-protocol-version", "2025-11-25")
        .header("mcp-session-id", "s")
        .header("last-event-id", &first)
        .header("x-forwarded-for", "198.51.100.1");
    client.send(&resume).await;
    assert_eq!(client.head().await.status, 200);
    assert!(!upstream.has_more().await, "no ping");
}

/// The proxy would forward any other such header as if the reverse proxy had sent it.
#[test]
fn the_samples_for_reverse_proxies_name_each_header_that_an_impostor_may_send() {
    let names = [
        "Forwarded",
        "X-Forwarded-By",
        "X-Forwarded-Port",
        "X-Forwarded-Prefix",
        "X-Forwarded-Protocol",
        "X-Forwarded-Scheme",
        "X-Forwarded-Server",
        "X-Forwarded-Ssl",
        "X-Real-IP",
    ];
    for (file, before, after) in [
        ("nginx.conf", "proxy_set_header ", " \"\";\n"),
        ("Caddyfile", "header_up -", "\n"),
    ] {
        let path = format!("{}/../deploy/{file}", env!("CARGO_MANIFEST_DIR"));
        let sample = std::fs::read_to_string(path).expect("a sample");
        for name in names {
            let removal = format!("{before}{name}{after}");
            assert!(sample.contains(&removal), "{file}: {name}");
        }
    }
}

/// Common reverse proxies set `X-Forwarded-For`, but pass on a client's own `Forwarded`.
///
/// This is true of nginx, HAProxy, Caddy, Envoy and Traefik.
#[tokio::test]
async fn a_client_behind_a_trusted_proxy_cannot_claim_another_address() {
    let (upstream, proxy) = Running::start(&["--trust-forwarded=127.0.0.1"]).await;
    let request = session_call("1")
        .header("x-forwarded-for", "192.0.2.1")
        .header("forwarded", "for=6.6.6.6;host=evil.example");
    let (seen, _) = exchange(&upstream, &proxy, &request, "200 OK", "").await;
    assert!(seen[3].starts_with("for=192.0.2.1;"), "{}", seen[3]);
    assert!(!seen[3].contains("6.6.6.6"), "{}", seen[3]);
}
