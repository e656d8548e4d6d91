//! An upstream that fails.

use crate::support::{Connection, Running, Upstream, call, post, session_call, within};

/// What the client gets for each status of the upstream: the same, with the same body.
#[tokio::test]
async fn each_status_of_an_upstream_reaches_the_client_and_the_next_call_is_served() {
    let upstream = Upstream::start().await;
    let proxy = Running::before(&upstream, &[]).await;
    for status in [
        400, 401, 403, 404, 405, 406, 409, 410, 415, 422, 429, 500, 501, 502, 503, 504,
    ] {
        let mut client = Connection::open(proxy.addr).await;
        client.send(&session_call("1")).await;
        let asked = within("the request", upstream.asked()).await;
        asked.answer(&format!("{status} Said"), "why").await;
        let reply = within("a reply", client.reply()).await;
        assert_eq!((reply.status, reply.text()), (status, "why"));
    }
    proxy.calls_reach(0).await;
    let mut client = Connection::open(proxy.addr).await;
    client.send(&session_call("2")).await;
    upstream
        .asked()
        .await
        .answer("200 OK\r\ncontent-type: application/json", "{}")
        .await;
    assert_eq!(client.head().await.status, 200);
}

/// A call is not sent twice: its upstream may have begun it.
#[tokio::test]
async fn an_upstream_that_closes_or_resets_gets_no_call_twice_and_the_next_is_served() {
    let upstream = Upstream::start().await;
    let proxy = Running::before(&upstream, &[]).await;
    for said in ["", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\ncontent-len"] {
        let mut client = Connection::open(proxy.addr).await;
        client
            .send(&post(&call("1")).header("mcp-session-id", "s"))
            .await;
        let mut asked = within("the request", upstream.asked()).await;
        asked.write(said).await;
        drop(asked);
        let reply = within("a reply", client.reply()).await;
        assert_eq!(
            (reply.status, &reply.json()["id"]),
            (502, &1.into()),
            "{said:?}"
        );
        assert!(!upstream.has_more().await, "it is sent twice");
    }
    proxy.calls_reach(0).await;
}
