//! Work that must not be stopped.
//!
//! This covers calls that complete, and other calls on a server in which something panics.

use std::sync::Arc;

use mcp_cancel_on_disconnect::{CallToken, CancelReason};
use rmcp::{RoleServer, service::RequestContext};
use tokio::sync::{Notify, mpsc};

use super::modes::{Bench, TransportMode, begin, for_modes};
use crate::{setup::Scripted, support::*};

for_modes! {
    a_completed_call_does_not_run_its_clean_up_and_gets_one_answer,
    a_cancelled_call_runs_its_clean_up_once,
    a_panic_in_a_clean_up_does_no_harm,
    a_panic_in_a_handler_does_not_harm_another,
}

/// The clean-ups that have run, as their calls' labels and the reasons.
type Ran = mpsc::UnboundedReceiver<(String, CancelReason)>;

async fn a_completed_call_does_not_run_its_clean_up_and_gets_one_answer(mode: TransportMode) {
    let (bench, mut ran, done) = start(mode).await;
    let mut call = bench.start_call(1, "a").await;
    let owned = Arc::new(());
    let owned_too = owned.clone();
    bench
        .setup
        .tokens
        .of("a")
        .on_cancel(async move |_| drop(owned_too));

    done.notify_one();

    assert_eq!(answers(&mut call).await, 1);
    assert!(bench.setup.witness.ended("a").await.is_completed());
    assert!(bench.setup.calls.is_empty());
    // The clean-up was dropped along with the call, although the token still exists.
    assert!(!bench.setup.tokens.of("a").is_cancelled());
    assert_eq!(Arc::strong_count(&owned), 1);
    bench.setup.assert_usable(&bench.mcp).await;
    assert!(ran.try_recv().is_err());
}

async fn a_cancelled_call_runs_its_clean_up_once(mode: TransportMode) {
    let (bench, mut ran, _done) = start(mode).await;

    bench.start_call(1, "a").await.fin();

    let reported = within("the clean-up to run", ran.recv()).await;
    let disconnected = CancelReason::ClientDisconnected;
    assert_eq!(reported, Some(("a".to_owned(), disconnected)));
    bench.setup.witness.ended("a").await;
    bench.setup.assert_usable(&bench.mcp).await;
    assert!(ran.try_recv().is_err());
}

async fn a_panic_in_a_clean_up_does_no_harm(mode: TransportMode) {
    let (bench, mut ran, done) = start(mode).await;
    let mut unaffected = bench.start_call(1, "staying").await;
    let cancelled_client = bench.start_call(2, "broken clean-up").await;

    cancelled_client.fin();

    let reported = within("its other clean-up to run", ran.recv()).await;
    assert_eq!(reported.expect("a report").0, "broken clean-up");
    bench.setup.witness.ended("broken clean-up").await;
    done.notify_one();
    assert_eq!(answers(&mut unaffected).await, 1);
}

async fn a_panic_in_a_handler_does_not_harm_another(mode: TransportMode) {
    let (bench, mut ran, done) = start(mode).await;
    let mut unaffected = bench.start_call(1, "staying").await;

    let mut broken = bench.start_call(2, "broken").await;

    let answer = broken.answer().await.expect("an answer");
    assert_eq!(answer["error"]["code"], -32_603);
    assert!(bench.setup.witness.ended("broken").await.is_dropped());
    done.notify_one();
    assert_eq!(answers(&mut unaffected).await, 1);
    assert!(ran.try_recv().is_err());
}

/// Starts a server whose handler has a clean-up and works until it gets the notice.
async fn start(mode: TransportMode) -> (Bench, Ran, Arc<Notify>) {
    let (reports, ran) = mpsc::unbounded_channel();
    let done = Arc::new(Notify::new());
    let cue = done.clone();
    let handler = Scripted::labelled(move |label, context| {
        let (reports, cue) = (reports.clone(), cue.clone());
        async move {
            clean_up_after(&label, &context, reports);
            begin(&context).await;
            if label == "broken" {
                panic!("the handler panics on purpose");
            }
            // This handler ignores its token.
            cue.notified().await;
            Ok("done".to_owned())
        }
    });
    (mode.start(handler).await, ran, done)
}

fn clean_up_after(
    label: &str,
    context: &RequestContext<RoleServer>,
    reports: mpsc::UnboundedSender<(String, CancelReason)>,
) {
    let call = CallToken::of(context).expect("the route has the layer");
    if label == "broken clean-up" {
        call.on_cancel(async |_| panic!("the clean-up panics on purpose"));
    }
    let label = label.to_owned();
    call.on_cancel(async move |reason| {
        // The test might have dropped its receiver.
        let _ = reports.send((label, reason));
    });
}

/// Reads a response in full and returns the number of answers in it.
async fn answers(call: &mut Connection) -> usize {
    let first = call.answer().await.expect("an answer");
    assert_eq!(first["result"]["content"][0]["text"], "done");
    let mut answers = 1;
    while let Some(event) = call.event().await {
        answers += usize::from(event.is_answer());
    }
    answers
}
