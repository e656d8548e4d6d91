//! Servers that write what they should not, or do not read.

use http::StatusCode;

use crate::{client::*, server::*};

#[tokio::test]
async fn a_server_that_chatters_before_it_is_initialized_is_understood() {
    let client = Client::begin(&serve(scripted(&["--chatter"])), OLD).await;
    assert!(client.pid().await > 0);
}

#[tokio::test]
async fn lines_that_are_no_messages_hurt_nobody() {
    let client = Client::begin(&serve(scripted(&[])), OLD).await;
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
    let client = Client::begin(&serve(scripted(&[])), OLD).await;
    assert_eq!(client.text("say", r#"{"length":100000000}"#).await, "done");
    assert!(client.pid().await > 0);
}

#[tokio::test]
async fn answers_to_nobody_reach_nobody() {
    let client = Client::begin(&serve(scripted(&[])), OLD).await;
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
async fn a_flood_of_stderr_is_read_away() {
    let client = Client::begin(&serve(scripted(&[])), OLD).await;
    assert_eq!(
        client
            .text("chat", r#"{"lines":20000,"length":1000}"#)
            .await,
        "done"
    );
}

#[tokio::test]
async fn a_flood_of_notifications_leaves_the_answer() {
    let client = Client::begin(&serve(scripted(&[])), OLD).await;
    let mut events = client.call("7", "notify", r#"{"lines":5000}"#).await;
    // Nobody reads until all was written: only the newest are kept, and the answer.
    let mut other = client.call("8", "pid", "{}").await;
    assert!(other.answer().await["result"].is_object());
    assert!(events.answer().await["result"].is_object());
}

#[tokio::test]
async fn a_server_that_never_reads_makes_a_queue_that_is_bounded() {
    let stdio = serve(scripted(&["--deaf"]));
    let (client, _events) = Client::knock(&stdio, OLD).await;
    let large = format!(
        r#"{{"jsonrpc":"2.0","method":"x","params":{{"x":"{}"}}}}"#,
        "x".repeat(100_000)
    );
    let mut taken = 0;
    loop {
        match client.tell(large.clone()).await {
            StatusCode::ACCEPTED => taken += 1,
            status => break assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE),
        }
        assert!(taken < 100, "the queue has no end");
    }
    assert_eq!(
        client.cancel("9").await,
        StatusCode::ACCEPTED,
        "there is room for cancels"
    );
    let other = serve(scripted(&[]));
    drop(Client::begin(&other, OLD).await);
    stdio.shutdown(LIMIT).await;
    assert_eq!(stdio.stats().children, 0);
}
