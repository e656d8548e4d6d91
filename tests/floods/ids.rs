//! Large numbers of ids, and very long ids.

use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use serde_json::json;

use crate::{
    Growth, KIB, MIB, run_alone,
    server::{Server, VICTIM, request},
    wrapped,
};

/// Roughly the longest id that fits into a body that is read.
const LONG: usize = 4_000_000;

fn immediate() -> CancelOnDisconnectLayer {
    CancelOnDisconnectLayer::new().grace(Grace::Immediate)
}

#[test]
fn a_hundred_thousand_event_ids_of_one_call_take_the_memory_of_a_few_hundred() {
    run_alone(async || {
        tokio::time::pause();
        let server = Server::new(immediate());
        let _victim = server.call(VICTIM.0, VICTIM.1).await;
        let message = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {} });
        let mut flood = request("POST", "flood", message.to_string());
        let many = "100000".parse().expect("a header");
        flood.headers_mut().insert("x-events", many);
        let growth = Growth::since_now();

        let mut body = server.send(flood).await.into_body();
        for _ in 0..100_000 {
            body.frame().await.expect("an event").expect("no error");
        }

        growth.assert_below(64 * KIB, "100,000 event ids of one call");
        drop(body);
        growth.assert_below(64 * KIB, "and after its end");
        server.assert_victim_in_flight();
    });
}

/// A cancelled call's record contains the client's id.
#[test]
fn long_ids_of_ended_calls_are_counted() {
    run_alone(async || {
        tokio::time::pause();
        let server = Server::new(immediate());
        let _victim = server.call(VICTIM.0, VICTIM.1).await;
        let growth = Growth::since_now();

        for nth in 0..20 {
            let id = format!("{nth}{}", "x".repeat(LONG));
            drop(server.call("flood", id).await);
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }

        growth.assert_below(2 * MIB, "20 ids of 4 MB");
        server.assert_victim_in_flight();
    });
}

/// The session outlives its calls and remembers which of them were cancelled.
#[test]
fn long_ids_of_cancelled_calls_are_not_stored_with_their_session() {
    run_alone(async || {
        let layer = immediate();
        let calls = layer.calls();
        let (witness, _served, mcp) = wrapped(layer).await;
        let growth = Growth::since_now();

        for nth in 0..50 {
            let label = nth.to_string();
            let id = format!("{nth}{}", "x".repeat(LONG / 4));
            let call = mcp.call(id, "hold", json!({ "label": &label })).await;
            witness.started(&label).await;
            call.fin();
            assert!(witness.ended(&label).await.is_cancelled());
        }
        test_support::within("the calls to end", async {
            while !calls.is_empty() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let mut echo = mcp.call(1, "echo", json!({ "text": "hi" })).await;
        assert!(echo.answer().await.is_some());
        drop(echo);

        growth.assert_below(16 * MIB, "50 ids of 1 MB and as many progress tokens");
    });
}
