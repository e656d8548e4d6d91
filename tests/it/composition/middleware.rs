//! The layer among other middleware.
//!
//! Whatever is around or inside the layer, a call whose client disconnects is cancelled, and other calls are not
//! affected.
//!
//! Every stack is served on a real socket in each [`SessionMode`]. Stacks are written as in axum, with the outermost
//! layer last.

use axum::Router;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason::ClientDisconnected, Outcome,
};
use serde_json::{Value, json};

use crate::{
    log::number,
    stack::{Bench, SessionMode},
    support::*,
};

mod limits;
mod panics;
mod split_batch;
mod stacks;
mod timeouts;
mod wiring;

/// The header that [`stacks`] requires on a request.
const AUTHORIZATION: (&str, &str) = ("authorization", "Bearer sesame");

/// Checks a stack in each mode.
async fn check(build: fn(Router, CancelOnDisconnectLayer) -> Router) {
    for mode in SessionMode::ALL {
        check_bench(&Bench::new(mode, build).await).await;
    }
}

/// Disconnects the client of one out of two calls.
///
/// The other call and a third one must complete.
async fn check_bench(bench: &Bench) {
    let Bench {
        mode, witness, log, ..
    } = bench;
    let mcp = bench.client(&[AUTHORIZATION]).await;
    let mut cancelled = mcp.call(1, "hold", json!({ "label": "gone" })).await;
    let mut stays = mcp.call(2, "hold", json!({ "label": "stays" })).await;
    witness.started("gone").await;
    witness.started("stays").await;
    assert_eq!(cancelled.head().await.status, 200, "{mode:?}");
    assert_eq!(bench.layer.calls().len(), 2, "{mode:?}");
    cancelled.fin();
    assert!(witness.ended("gone").await.is_cancelled(), "{mode:?}");
    // Bare rmcp cancels stateless calls itself, so the log has to show that it was the layer.
    let cancelled = Outcome::Cancelled(ClientDisconnected);
    assert_eq!(log.ends(&number(1)), [cancelled], "{mode:?}");
    assert!(witness.is_running("stays"), "{mode:?}");
    witness.release("stays");
    let answer = whole_answer(&mut stays).await;
    assert_eq!(answer["id"], 2, "{mode:?}");
    assert_eq!(text(&answer), "done:stays", "{mode:?}");
    let mut echo = mcp.call("3", "echo", json!({ "text": "again" })).await;
    assert_eq!(text(&whole_answer(&mut echo).await), "again", "{mode:?}");
    assert!(bench.layer.calls().is_empty(), "{mode:?}");
    assert_eq!(log.cancelled().len(), 1, "{mode:?}");
    assert_eq!(witness.starts("gone") + witness.starts("stays"), 2);
}

/// Returns a call's answer, and reads the response in full.
///
/// This lets the layer see its end, too.
async fn whole_answer(call: &mut Connection) -> Value {
    let answer = call.answer().await.expect("an answer");
    call.body_to_end().await;
    assert!(call.is_complete(), "the response was cut off");
    answer
}

/// Returns the text in a tool's result.
fn text(answer: &Value) -> &str {
    let text = &answer["result"]["content"][0]["text"];
    text.as_str().expect("a result with a text")
}
