//! Client text that the layer repeats. It must stay within its field, event or line.

use mcp_cancel_on_disconnect::CancelReason;
use serde_json::{Value, json};

use crate::setup::{Lines, Plan, Server, Setup, arguments, for_servers};

/// In some format, each of these would end a line, an event, a field or a string.
const HOSTILE: [&str; 7] = [
    "a\n\ndata: {\"forged\":true}\n\n",
    "a\r\n\r\nevent: forged\r\rid: 9/9",
    "a\"},\"result\":{\"forged\":true},\"x\":{\"",
    "a\\\",\\u0022",
    "a\u{2028}\u{2029}\u{85}\u{b}\u{c}\0\u{7f}",
    "a\u{1b}[2K\u{9b}31m\u{202e}",
    "a: b\n:c",
];

const MEGABYTE: usize = 1_000_000;

for_servers!(all {
    no_id_breaks_the_event_that_reports_a_cancel,
    an_id_of_a_megabyte_is_sent_whole_and_logged_truncated,
} sessions {
    no_id_breaks_the_event_that_a_late_client_gets,
});

async fn no_id_breaks_the_event_that_reports_a_cancel(server: Server) {
    let (setup, mcp) = server.client().await;
    for (nth, hostile) in HOSTILE.into_iter().enumerate() {
        let label = format!("call {nth}");
        let mut call = setup.start_call(&mcp, hostile, "hold", &label).await;
        assert_eq!(cancel_all(&setup), 1);
        assert_eq!(
            call.messages().await,
            [cancelled(hostile, CancelReason::Requested)],
            "{hostile:?}"
        );
        assert!(setup.witness.ended(&label).await.is_cancelled());
    }
}

async fn an_id_of_a_megabyte_is_sent_whole_and_logged_truncated(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = server.client().await;
    let id = "\n".repeat(MEGABYTE);
    let mut call = setup.start_call(&mcp, id.clone(), "hold", "a").await;

    assert_eq!(cancel_all(&setup), 1);

    assert_eq!(
        call.messages().await,
        [cancelled(&id, CancelReason::Requested)]
    );
    let lines = lines.of_layer();
    assert!(lines.len() >= 2, "{lines:#?}");
    assert!(lines.iter().all(|line| line.len() < 1_000), "{lines:#?}");
}

async fn no_id_breaks_the_event_that_a_late_client_gets(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    for (nth, hostile) in HOSTILE.into_iter().enumerate() {
        let label = format!("call {nth}");
        let mut call = setup.start_call(&mcp, hostile, "hold", &label).await;
        call.head().await;
        let first = call.event().await.expect("the priming event");
        call.fin();
        setup.events.detached(&mcp, hostile).await;
        assert_eq!(mcp.cancel(hostile).await, 202);
        setup.events.ended(&mcp, hostile).await;

        let mut late = mcp.resume(&first.id.expect("an id")).await;

        assert_eq!(
            late.messages().await,
            [cancelled(hostile, CancelReason::ClientCancelled)],
            "{hostile:?}"
        );
    }
}

/// The layer repeats the id from which the client resumes, and then sends the answer.
#[tokio::test]
async fn no_event_id_breaks_the_event_that_repeats_it() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped).client().await;
    let mut call = mcp.call(1, "hold", arguments("a")).await;
    setup.witness.started("a").await;
    call.head().await;
    call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(&mcp, 1).await;
    setup.witness.release("a");
    setup.events.ended(&mcp, 1).await;

    // Ids that fit into a header. rmcp takes some of them to mean the first stream.
    for id in [
        "0/0",
        "9/0",
        "0/0\tdata: forged",
        "0/0 id: forged",
        "0/0;\"'<>",
    ] {
        let mut late = mcp.resume(id).await;
        late.head().await;
        let mut events = Vec::new();
        while let Some(event) = late.event().await {
            events.push(event);
        }
        let forged = events.iter().any(|event| event.data.contains("forged"));
        assert!(!forged, "{id:?}: {events:#?}");
        assert!(
            events.is_empty() || events.len() == 2,
            "{id:?}: {events:#?}"
        );
    }
}

fn cancel_all(setup: &Setup) -> usize {
    let calls = setup.calls.snapshot().into_iter();
    let cancelled = calls.filter(|call| {
        let id = call.info().id();
        setup.calls.cancel(id, CancelReason::Requested)
    });
    cancelled.count()
}

fn cancelled(id: &str, reason: CancelReason) -> Value {
    let text = format!("Request cancelled: {reason}");
    let error = json!({ "code": -32_800, "message": text });
    json!({ "jsonrpc": "2.0", "id": id, "error": error })
}
