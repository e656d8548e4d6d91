//! Answers that are slightly wrong, but that a client would accept.

use std::time::Duration;

use http::StatusCode;
use tokio::time::{sleep, timeout};

use crate::{client::*, server::*};

/// Returns the script of a server that answers each call with the next of these lines.
fn answering(lines: &[&str]) -> String {
    let mut script = String::from(
        r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; read line
        "#,
    );
    for line in lines {
        script += &format!("read line; printf '%b\\n' '{line}'\n");
    }
    script + "cat > /dev/null"
}

async fn request(client: &Client, id: &str) -> Vec<String> {
    let call = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"x"}}"#);
    let mut events = client.request(call).await;
    timeout(Duration::from_secs(10), events.rest())
        .await
        .expect("the call should end")
}

#[tokio::test]
async fn an_answer_with_the_text_of_its_id_or_with_a_null_beside_it_reaches_its_call_once() {
    let lines = [
        r#"{"jsonrpc":"2.0","id":"7","result":{"a":1}}"#,
        r#"{"jsonrpc":"2.0","id":8,"result":{"a":1},"error":null}"#,
        r#"{"jsonrpc":"2.0","id":9,"result":null,"error":{"code":1,"message":"m"}}"#,
    ];
    let client = Client::begin(&serve(shell(&answering(&lines))), WITHOUT_PRIMING).await;
    for (id, line) in ["7", "8", "9"].into_iter().zip(lines) {
        assert_eq!(request(&client, id).await, [line]);
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_read_ends_its_call_with_an_error() {
    let lines = [
        r#"{"jsonrpc":"2.0","id":7,"result":{"a":NaN}}"#,
        r#"{"jsonrpc":"2.0","id":8,"result":{"a":"\0377"}}"#,
    ];
    let client = Client::begin(&serve(shell(&answering(&lines))), WITHOUT_PRIMING).await;
    for id in ["7", "8"] {
        let rest = request(&client, id).await;
        assert_eq!(rest.len(), 1, "{rest:?}");
        assert!(
            rest[0].contains(&format!(r#""id":{id},"error""#)),
            "{rest:?}"
        );
        assert!(rest[0].contains("not valid UTF-8 JSON"), "{rest:?}");
    }
}

#[tokio::test]
async fn a_process_is_not_killed_for_an_answer_behind_a_client_that_does_not_read() {
    let script = r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; read line; read line
        i=0; while [ $i -lt 300 ]; do echo '{"jsonrpc":"2.0","id":"q'$i'","method":"roots/list"}'; i=$((i+1)); done
        read line; read line; echo '{"jsonrpc":"2.0","id":2,"result":{}}'
        read line; echo '{"jsonrpc":"2.0","id":1,"result":{}}'; cat > /dev/null"#;
    let mut options = shell(script);
    options.kill_after = Some(Duration::from_millis(300));
    let stdio = serve(options);
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let call = |id: u32| format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"x"}}"#);
    let mut unread = client.request(call(1)).await;
    // By now all of the server's requests are queued in the stream and in the pipe.
    sleep(Duration::from_millis(500)).await;
    let _cancelled = client.request(call(2)).await;
    assert_eq!(client.cancel("2").await, StatusCode::ACCEPTED);
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(
        client
            .notify(r#"{"jsonrpc":"2.0","method":"notifications/x"}"#)
            .await,
        StatusCode::ACCEPTED
    );
    let rest = unread.rest().await;
    assert_eq!(
        rest.last().map(String::as_str),
        Some(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#)
    );
    assert_eq!(stdio.stats().kills, 0);
}

#[tokio::test]
async fn a_process_that_does_not_answer_a_cancelled_call_is_killed() {
    let script = r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; cat > /dev/null"#;
    let mut options = shell(script);
    options.kill_after = Some(Duration::from_millis(300));
    let stdio = serve(options);
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let mut call = client
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
        .await;
    assert_eq!(client.cancel("1").await, StatusCode::ACCEPTED);
    timeout(LIMIT, call.rest())
        .await
        .expect("the call should end");
    until(|| stdio.stats().kills == 1).await;
}

#[tokio::test]
async fn a_client_that_deletes_its_session_gets_the_outcome_of_its_calls() {
    for _ in 0..20 {
        let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
        let mut open = client.call("1", "work", r#"{"seconds":60}"#).await;
        let mut answered = client.call("2", "work", r#"{"seconds":0}"#).await;
        // The answer has arrived, but the client has not read it.
        sleep(Duration::from_millis(50)).await;
        assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
        assert_eq!(
            open.answer().await["error"]["message"],
            "the session was deleted"
        );
        assert!(answered.answer().await["result"].is_object());
        assert_eq!((open.next().await, answered.next().await), (None, None));
    }
}

#[tokio::test]
async fn nothing_is_started_for_an_initialize_without_a_valid_id() {
    use std::os::unix::fs::PermissionsExt as _;
    let path = log_path();
    std::fs::write(&path, "#!/bin/sh\ncat\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = mcp_cancel_proxy::stdio::Program::new(&path, []);
    let stdio = serve(mcp_cancel_proxy::stdio::Options::new(program));
    // From now on starting the process fails, which would be answered with 502.
    std::fs::remove_file(&path).unwrap();
    let long = format!("\"{}\"", "x".repeat(2_000));
    for id in ["null", "{}", &long] {
        let body = initialize(WITH_PRIMING).replace(r#""id":0"#, &format!(r#""id":{id}"#));
        let response = send(&stdio, post().body(body.into()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{id:.20}");
    }
    let response = send(
        &stdio,
        post().body(initialize(WITH_PRIMING).into()).unwrap(),
    )
    .await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn after_its_process_exited_a_client_gets_the_remaining_events_and_otherwise_404() {
    let script = r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; read line; read line
        echo '{"jsonrpc":"2.0","id":1,"result":{}}'; exit 3"#;
    let stdio = serve(shell(script));
    let client = Client::begin(&stdio, WITH_PRIMING).await;
    let mut call = client
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
        .await;
    let primed = call.next().await.unwrap().id.unwrap();
    let last = call.next().await.unwrap().id.unwrap();
    until(|| stdio.stats().sessions == 0).await;
    assert_eq!(client.get(None).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(
        client.get(Some(&last)).await.status(),
        StatusCode::NOT_FOUND
    );
    let mut late = Events::of(client.get(Some(&primed)).await);
    assert!(late.answer().await["result"].is_object());
}

/// A server that logs JSON to its stdout. SDK clients ignore such lines, because they have no `"jsonrpc": "2.0"`.
#[tokio::test]
async fn a_log_line_in_json_is_not_a_message() {
    let answer = r#"{"jsonrpc":"2.0","id":7,"result":{"a":1}}"#;
    for log in [
        r#"{"level":"error","id":7,"error":"issue 7 not found","time":1764241000}"#,
        r#"{"level":50,"id":7,"result":null,"error":"x","error":"y"}"#,
        r#"{"level":30,"method":"GET","url":"/"}"#,
    ] {
        let script = answering(&[&format!("{log}\\n{answer}")]);
        let client = Client::begin(&serve(shell(&script)), WITHOUT_PRIMING).await;
        assert_eq!(request(&client, "7").await, [answer], "{log}");
    }
}
