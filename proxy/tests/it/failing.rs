//! Servers that fail, and what their clients get.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::support::*;

/// Returns the URL of a port on which no server is listening.
async fn unused_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("an address");
    format!("http://{addr}/mcp")
}

#[tokio::test]
async fn a_server_that_is_down_causes_an_error_with_the_id_of_the_request() {
    let proxy = Running::in_front_of_url(&unused_url().await, &[]).await;
    for id in ["1", "1.0", "\"\\u0061\"", "12345678901234567890123"] {
        let reply = Connection::fetch(proxy.addr, &session_call(id)).await;
        assert_eq!(reply.status, 502);
        assert_eq!(reply.headers["content-type"], "application/json");
        let expected = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32000,"#);
        assert!(reply.text().starts_with(&expected), "{}", reply.text());
        assert!(reply.text().contains("is unreachable"));
    }
}

#[tokio::test]
async fn the_error_has_no_id_if_the_request_has_no_readable_one() {
    let proxy = Running::in_front_of_url(&unused_url().await, &[]).await;
    let long = format!(
        r#"{{"id":1,"method":"x","params":"{}"}}"#,
        "a".repeat(100_000)
    );
    let get = Request::new("GET", "/mcp").header("accept", "text/event-stream");
    for request in [post("{"), post("[1]"), post(&long), get] {
        let reply = Connection::fetch(proxy.addr, &request).await;
        assert_eq!(reply.status, 502);
        assert!(reply.json()["id"].is_null());
    }
}

/// The test ends after the first message, because this machine does not trust any test certificate.
#[tokio::test]
async fn an_https_server_receives_a_tls_handshake_and_no_plain_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("an address").port();
    let proxy = Running::in_front_of_url(&format!("https://localhost:{port}/mcp"), &[]).await;
    let (mut probe, _) = listener.accept().await.expect("the probe of the start");
    assert_eq!(probe.read(&mut [0]).await.expect("the end of the probe"), 0);
    let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut greeting = vec![0; 512];
    let length = stream.read(&mut greeting).await.expect("a greeting");
    let greeting = &greeting[..length];
    // A TLS 1 handshake that contains the host.
    assert_eq!(greeting[..2], [0x16, 0x03]);
    assert!(greeting.windows(9).any(|name| name == b"localhost"));
    stream
        .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        .await
        .expect("the proxy is reading");
    let reply = client.reply().await;
    assert_eq!((reply.status, &reply.json()["id"]), (502, &1.into()));
}

#[tokio::test]
async fn the_wait_for_a_tls_handshake_is_limited() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("an address").port();
    let proxy = Running::in_front_of_url(&format!("https://localhost:{port}/mcp"), &[]).await;
    let get = Request::new("GET", "/mcp").header("accept", "text/event-stream");
    let (reply, _silent) = tokio::join!(Connection::fetch(proxy.addr, &get), listener.accept());
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains("is unreachable"));
}

#[tokio::test]
async fn a_server_that_closes_before_it_answers_causes_an_error() {
    let (upstream, proxy) = Running::start(&[]).await;
    for written in ["", "HTTP/1.1 200", "nonsense\r\n\r\n"] {
        let mut client = Connection::sending(proxy.addr, &session_call("7")).await;
        let mut received = upstream.next_request().await;
        received.write(written).await;
        drop(received);
        let reply = client.reply().await;
        assert_eq!(
            (reply.status, &reply.json()["id"]),
            (502, &7.into()),
            "{written}"
        );
        assert!(reply.text().contains("did not respond"));
    }
    proxy.calls_reach(0).await;
}

#[tokio::test]
async fn a_response_that_is_cut_is_cut_for_the_client() {
    let (upstream, proxy) = Running::start(&["--no-resumable"]).await;
    let (mut client, mut received) = proxy.streaming(&upstream, &stateless_call("1")).await;
    received.chunk("data: half\n").await;
    assert_eq!(client.data().await.expect("data"), "data: half\n");
    drop(received);
    assert_eq!(client.data().await, None);
    assert!(!client.is_complete(), "the cut response looks complete");
}

#[tokio::test]
async fn the_error_for_an_answer_with_more_than_a_hundred_header_fields_names_the_limit() {
    let (upstream, proxy) = Running::start(&[]).await;
    for (fields, status) in [(90, 200), (101, 502)] {
        let mut client = Connection::sending(proxy.addr, &session_call("7")).await;
        let fields: String = (0..fields).map(|n| format!("\r\nx-{n}: 1")).collect();
        let received = upstream.next_request().await;
        received.answer(&format!("200 OK{fields}"), "{}").await;
        let reply = client.reply().await;
        assert_eq!(reply.status, status);
        let names_the_limit = reply.text().contains("more than 100 header fields");
        assert_eq!(names_the_limit, status == 502, "{}", reply.text());
    }
}
