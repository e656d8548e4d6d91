//! Redirects sent by the server, which must neither bypass the proxy nor reveal the configured query.

use crate::support::*;

/// Sends a call, which the server answers with this head.
///
/// Returns the request line that the server receives, and the client's reply.
async fn exchange(upstream: &Upstream, proxy: &Running, path: &str, head: &str) -> (String, Reply) {
    let request = Request {
        path: path.to_owned(),
        ..session_call("7")
    };
    let mut client = Connection::sending(proxy.addr, &request).await;
    let received = upstream.next_request().await;
    let line = received.line.clone();
    received
        .answer(head, "moved to http://up/a/mcp/?key=s3cret")
        .await;
    (line, client.reply().await)
}

#[tokio::test]
async fn a_redirect_of_the_server_leads_to_the_proxy_without_the_configured_query() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let proxy = Running::in_front_of_url(&format!("http://{addr}/a/mcp?key=s3cret"), &[]).await;
    for (location, expected) in [
        ("/a/mcp/?key=s3cret".to_owned(), "/a/mcp/"),
        (format!("http://{addr}/a/mcp/?key=s3cret&b"), "/a/mcp/?b"),
        (format!("//{addr}/a/mcp/?b&k%65y=s3cret"), "/a/mcp/?b"),
        ("mcp/".to_owned(), "/a/mcp/"),
    ] {
        for status in [
            "301 Moved Permanently",
            "307 Temporary Redirect",
            "308 Permanent Redirect",
        ] {
            let head = format!("{status}\r\nlocation: {location}\r\nrefresh: 0; url={location}");
            let (line, reply) = exchange(&upstream, &proxy, "/a/mcp", &head).await;
            assert_eq!(line, "POST /a/mcp?key=s3cret HTTP/1.1");
            assert!(status.starts_with(&reply.status.to_string()));
            assert_eq!(reply.headers["location"], expected, "{location}");
            let shown = format!("{:?}{}", reply.headers, reply.text());
            assert!(!shown.contains("s3cret"), "{shown}");
            // The client follows the redirect, and the server gets its query again.
            let (line, _) = exchange(&upstream, &proxy, expected, "200 OK").await;
            assert!(line.starts_with("POST /a/mcp/?key=s3cret"), "{line}");
        }
    }
}

#[tokio::test]
async fn a_redirect_past_the_proxy_is_answered_with_502_and_the_reason() {
    let upstream = Upstream::start().await;
    let addr = upstream.addr;
    let proxy = Running::in_front_of_url(&format!("http://{addr}/mcp?key=s3cret"), &[]).await;
    for location in [
        "https://other.example/mcp".to_owned(),
        format!("https://{addr}/mcp"),
        "/login?next=/mcp".to_owned(),
        format!("http://{addr}//other.example/mcp"),
        "/mcp/../admin".to_owned(),
        "/mcp/\\other.example".to_owned(),
        "/mcp/?next=%2Fmcp%3Fkey%3Ds3cret".to_owned(),
    ] {
        let head = format!("307 Temporary Redirect\r\nlocation: {location}");
        let (_, reply) = exchange(&upstream, &proxy, "/mcp", &head).await;
        assert_eq!(
            (reply.status, &reply.json()["id"]),
            (502, &7.into()),
            "{location}"
        );
        assert!(
            reply.text().contains("redirects to another origin"),
            "{}",
            reply.text()
        );
        assert!(!reply.headers.contains_key("location"));
        assert!(!reply.text().contains("s3cret"));
    }
}

/// The authorization server may be a different one, which the client contacts directly.
#[tokio::test]
async fn metadata_may_be_elsewhere_and_other_responses_pass() {
    let (upstream, proxy) = Running::start(&[]).await;
    for (path, head) in [
        (
            "/.well-known/oauth-authorization-server",
            "302 Found\r\nlocation: https://id.example/.well-known/oauth-authorization-server",
        ),
        (
            "/mcp",
            "304 Not Modified\r\nlocation: https://other.example/",
        ),
        ("/mcp", "201 Created\r\nlocation: https://other.example/"),
    ] {
        let mut client = Connection::sending(proxy.addr, &Request::new("GET", path)).await;
        let mut received = upstream.next_request().await;
        received
            .write(format!(
                "HTTP/1.1 {head}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            ))
            .await;
        let reply = client.reply().await;
        assert!(head.starts_with(&reply.status.to_string()));
        let (_, location) = head.split_once(": ").expect("a place");
        assert_eq!(reply.headers["location"], location);
    }
}
