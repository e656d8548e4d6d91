//! CORS headers for the pages of allowed origins.

use crate::support::*;

const PAGE: &str = "https://app.example.com";
const OPTION: [&str; 1] = ["--allow-origin=https://app.example.com, https://other.example.com:443"];

/// Sends a request with these header lines.
async fn send(proxy: &Running, method: &str, headers: &str) -> Connection {
    let mut client = Connection::open(proxy.addr).await;
    let head = format!("{method} /mcp HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    client.write(head.as_bytes()).await;
    client
}

fn preflight(origin: &str) -> String {
    format!(
        "origin: {origin}\r\naccess-control-request-method: POST\r\n\
         access-control-request-headers: content-type,last-event-id,mcp-session-id\r\n"
    )
}

/// Returns the response head of a GET, to which the server adds a CORS header of its own.
async fn get(proxy: &Running, upstream: &Upstream, headers: &str) -> Head {
    let mut client = send(proxy, "GET", headers).await;
    let received = upstream.next_request().await;
    let head = "405 Method Not Allowed\r\naccess-control-allow-origin: https://upstream.example";
    received.answer(head, "").await;
    client.head().await
}

#[tokio::test]
async fn a_preflight_request_from_an_allowed_page_is_answered() {
    let (upstream, proxy) = Running::start(&OPTION).await;
    for origin in [PAGE, "https://other.example.com"] {
        let mut client = send(&proxy, "OPTIONS", &preflight(origin)).await;
        let head = client.head().await;
        assert_eq!(head.status, 200);
        assert_eq!(head.header("access-control-allow-origin"), Some(origin));
        assert_eq!(
            head.header("access-control-allow-methods"),
            Some("GET,POST,DELETE")
        );
        assert_eq!(
            head.header("access-control-allow-headers"),
            Some("content-type,last-event-id,mcp-session-id")
        );
    }
    assert!(
        !upstream.has_more().await,
        "the server has received a preflight request"
    );
}

#[tokio::test]
async fn an_allowed_page_may_read_the_responses_and_the_session_id() {
    let (upstream, proxy) = Running::start(&OPTION).await;
    let head = get(&proxy, &upstream, &format!("origin: {PAGE}\r\n")).await;
    assert_eq!(head.status, 405);
    assert_eq!(head.header("access-control-allow-origin"), Some(PAGE));
    assert_eq!(
        head.header("access-control-expose-headers"),
        Some("mcp-session-id,www-authenticate,retry-after")
    );
    let vary = head.header("vary");
    assert!(vary.is_some_and(|vary| vary.contains("origin")));
}

#[tokio::test]
async fn pages_from_other_origins_get_no_cors_headers() {
    let (upstream, proxy) = Running::start(&OPTION).await;
    let mut client = send(&proxy, "OPTIONS", &preflight("https://evil.example")).await;
    let head = client.head().await;
    assert_eq!(head.status, 403);
    assert_eq!(head.header("access-control-allow-origin"), None);
    // A page on another port of this host may send requests.
    let head = get(&proxy, &upstream, "origin: http://localhost:6274\r\n").await;
    let allowed = head.header("access-control-allow-origin");
    assert_ne!(allowed, Some("http://localhost:6274"));
}

#[tokio::test]
async fn without_the_option_the_server_answers_preflight_requests() {
    let (upstream, proxy) = Running::start(&[]).await;
    let origin = "http://localhost:6274";
    let mut client = send(&proxy, "OPTIONS", &preflight(origin)).await;
    let received = upstream.next_request().await;
    assert_eq!(received.headers["access-control-request-method"], "POST");
    let head = format!("200 OK\r\naccess-control-allow-origin: {origin}");
    received.answer(&head, "").await;
    let head = client.head().await;
    assert_eq!(head.header("access-control-allow-origin"), Some(origin));
}

/// Browsers ignore `Access-Control-Allow-Credentials` next to the origin `*`, but not next to the page's own origin.
#[tokio::test]
async fn a_server_header_cannot_give_a_page_credentials() {
    let (upstream, proxy) = Running::start(&OPTION).await;
    let mut client = send(&proxy, "GET", &format!("origin: {PAGE}\r\n")).await;
    let received = upstream.next_request().await;
    let head = "405 Method Not Allowed\r\naccess-control-allow-origin: *\r\n\
                access-control-allow-credentials: true";
    received.answer(head, "").await;
    let head = client.head().await;
    assert_eq!(head.header("access-control-allow-origin"), Some(PAGE));
    assert_eq!(head.header("access-control-allow-credentials"), None);
}
