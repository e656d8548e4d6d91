//! What do operators see?

use std::net::SocketAddr;

use crate::support::*;

async fn get(admin: SocketAddr, path: &str) -> Reply {
    Connection::fetch(admin, &Request::new("GET", path)).await
}

#[tokio::test]
async fn health_metrics_and_calls_are_shown() {
    let upstream = Upstream::start().await;
    let proxy = Running::before(&upstream, &["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let mut client = Connection::open(proxy.addr).await;
    client.send(&session_call("1")).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    client.head().await;

    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert_eq!(get(admin, "/readyz").await.status, 200);
    let calls = get(admin, "/calls.json").await.json();
    assert_eq!(calls["calls"][0]["tool"], "work");
    let page = get(admin, "/calls").await;
    assert!(page.text().contains("1 in flight"), "{}", page.text());
    let metrics = get(admin, "/metrics").await;
    assert!(metrics.text().contains("mcp_calls_"), "{}", metrics.text());
}

#[tokio::test]
async fn the_button_of_a_call_cancels_it() {
    let upstream = Upstream::start().await;
    let proxy = Running::before(&upstream, &["--admin=127.0.0.1:0", "--no-resumable"]).await;
    let admin = proxy.admin.expect("an address");
    let mut client = Connection::open(proxy.addr).await;
    client.send(&session_call("1")).await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    client.head().await;
    let calls = get(admin, "/calls.json").await.json();
    let id = calls["calls"][0]["id"].as_str().expect("an id").to_owned();
    let press = Request::new("POST", "/calls")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(format!("call={id}"));

    assert_eq!(
        Connection::fetch(admin, &press).await.status,
        403,
        "from nowhere"
    );
    let press = press.header("origin", &format!("http://{admin}"));
    assert_eq!(Connection::fetch(admin, &press).await.status, 303);

    let answer = client.answer().await.expect("an error");
    assert_eq!(answer["error"]["code"], -32800);
    let cancel = upstream.asked().await;
    assert!(cancel.body().contains("notifications/cancelled"));
    assert_eq!(get(admin, "/calls.json").await.text(), r#"{"calls":[]}"#);
}

#[tokio::test]
async fn the_calls_are_for_this_machine_only() {
    let upstream = Upstream::start().await;
    let local = Running::before(&upstream, &["--admin=127.0.0.1:0"]).await;
    let mut client = Connection::open(local.admin.expect("an address")).await;
    client
        .write(b"GET /calls HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        .await;
    assert_eq!(client.head().await.status, 403);

    let open = Running::before(&upstream, &["--admin=0.0.0.0:0"]).await;
    let port = open.admin.expect("an address").port();
    let admin = SocketAddr::from(([127, 0, 0, 1], port));
    assert_eq!(get(admin, "/healthz").await.status, 200);
    for path in ["/calls", "/calls.json", "/calls.js"] {
        assert_eq!(get(admin, path).await.status, 404, "{path}");
    }
}
