//! Servers that write what they should not, or that do not read.

use futures_util::future::join_all;
use http::StatusCode;

use crate::{client::*, server::*};

#[tokio::test]
async fn messages_before_initialize_are_accepted() {
    let client = Client::begin(&serve(scripted(&["--chatter"])), WITHOUT_PRIMING).await;
    assert!(client.pid().await > 0);
}

#[tokio::test]
async fn lines_that_are_not_messages_have_no_effect() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    for text in [
        "hello",
        "[]",
        "{}",
        "7",
        "{\\\"id\\\":1",
        "[{\\\"id\\\":1}]",
        "\\r",
        "\\u0000",
    ] {
        assert_eq!(
            client.text("say", &format!(r#"{{"text":"{text}"}}"#)).await,
            "done"
        );
    }
}

#[tokio::test]
async fn a_line_of_a_hundred_megabytes_is_skipped() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    assert_eq!(client.text("say", r#"{"length":100000000}"#).await, "done");
    assert!(client.pid().await > 0);
}

#[tokio::test]
async fn an_answer_that_is_too_long_ends_its_call_with_an_error_and_no_other() {
    // SDKs differ in where they put the id.
    let script = r#"
        text() { head -c 17000000 /dev/zero | tr '\0' x; }
        read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'
        read line; read line; read line
        printf '{"jsonrpc":"2.0","id":7,"result":{"id":6,"text":"'; text; echo '"}}'
        read line
        printf '{"result":{"id":6,"text":"'; text; echo '"},"jsonrpc":"2.0","id":8}'
        read line
        printf '{"jsonrpc":"2.0","id":9,"method":"roots/list","params":"'; text; echo '"}'
        echo '{"jsonrpc":"2.0","id":9,"result":{}}'
        echo '{"jsonrpc":"2.0","id":6,"result":{}}'
        read line"#;
    let client = Client::begin(&serve(shell(script)), WITH_PRIMING).await;
    let request = async |id: u32| {
        let call = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"x"}}"#);
        client.request(call).await
    };
    let mut other = request(6).await;
    for id in [7, 8] {
        let mut events = request(id).await;
        let primed = events.next().await.unwrap();
        let error = events.answer().await;
        assert_eq!(
            (&error["id"], &error["error"]["code"]),
            (&id.into(), &(-32000).into())
        );
        let text = error["error"]["message"].as_str().unwrap();
        assert!(text.contains("larger than 16 MiB"), "{text}");
        assert_eq!(events.next().await, None);
        let mut late = Events::of(client.get(primed.id.as_deref()).await);
        assert_eq!(late.answer().await, error);
    }
    assert!(request(9).await.answer().await["result"].is_object());
    assert!(other.answer().await["result"].is_object());
}

#[tokio::test]
async fn a_byte_order_mark_at_the_start_is_accepted() {
    let script = r#"read line; printf '\357\273\277{"jsonrpc":"2.0","id":0,"result":{}}\n'; cat"#;
    Client::begin(&serve(shell(script)), WITH_PRIMING).await;
}

/// Revision 2025-03-26 has batches, even for answers to calls that were not in a batch.
#[tokio::test]
async fn the_messages_of_a_batch_reach_their_calls() {
    let script = r#"
        read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'
        read line; read line; read line
        echo '[{"jsonrpc":"2.0","id":1.0,"result":{"a":1}}, 7 ,{"jsonrpc":"2.0","id":2,"result":{"b":2}}]'
        read line"#;
    let client = Client::begin(&serve(shell(script)), "2025-03-26").await;
    let mut first = client
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
        .await;
    let mut second = client
        .request(r#"{"jsonrpc":"2.0","id":2,"method":"x"}"#)
        .await;
    assert_eq!(
        first.rest().await,
        [r#"{"jsonrpc":"2.0","id":1.0,"result":{"a":1}}"#]
    );
    assert_eq!(
        second.rest().await,
        [r#"{"jsonrpc":"2.0","id":2,"result":{"b":2}}"#]
    );
}

#[tokio::test]
async fn answers_to_no_request_reach_no_client() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut working = client.call("1", "work", r#"{"seconds":0.5}"#).await;
    for id in ["\\\"1\\\"", "1.5", "2", "null"] {
        let answer = format!(
            r#"{{"text":"{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"wrong\":1}}}}"}}"#
        );
        assert_eq!(client.text("say", &answer).await, "done");
    }
    let messages = working.rest().await;
    assert!(
        messages.iter().all(|message| !message.contains("wrong")),
        "{messages:?}"
    );
    assert!(messages.last().unwrap().contains("worked for"));
}

#[tokio::test]
async fn a_flood_of_stderr_does_not_block_the_process() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    assert_eq!(
        client
            .text("chat", r#"{"lines":20000,"length":1000}"#)
            .await,
        "done"
    );
}

#[tokio::test]
async fn a_flood_of_notifications_does_not_evict_the_answer() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut events = client.call("7", "notify", r#"{"lines":5000}"#).await;
    // No client reads before everything has been written, so only the newest events and the answer are kept.
    let mut other = client.call("8", "pid", "{}").await;
    assert!(other.answer().await["result"].is_object());
    assert!(events.answer().await["result"].is_object());
}

#[tokio::test]
async fn simultaneous_calls_are_all_accepted() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let ids: Vec<_> = (1..=300).map(|id| id.to_string()).collect();
    let calls = ids.iter().map(|id| client.call(id, "pid", "{}"));
    for mut events in join_all(calls).await {
        assert!(events.answer().await["result"].is_object());
    }
}

#[tokio::test]
async fn the_queue_of_a_server_that_never_reads_is_bounded() {
    let stdio = serve(scripted(&["--deaf"]));
    let (client, _events) = Client::initialize(&stdio, WITHOUT_PRIMING).await;
    let large = format!(
        r#"{{"jsonrpc":"2.0","method":"x","params":{{"x":"{}"}}}}"#,
        "x".repeat(100_000)
    );
    let mut accepted = 0;
    loop {
        match client.notify(large.clone()).await {
            StatusCode::ACCEPTED => accepted += 1,
            status => break assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE),
        }
        assert!(accepted < 100, "the queue is not bounded");
    }
    assert_eq!(
        client.cancel("9").await,
        StatusCode::ACCEPTED,
        "there must be room for cancels"
    );
    let other = serve(scripted(&[]));
    drop(Client::begin(&other, WITHOUT_PRIMING).await);
    stdio.shutdown(LIMIT).await;
    assert_eq!(stdio.stats().children, 0);
}
