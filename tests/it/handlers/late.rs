//! Messages of a handler that ignores its token, sent after its call was cancelled: with the wrapper they
//! go nowhere, from bare rmcp they come out of the session's standalone stream.

use std::sync::Arc;

use rmcp::{
    RoleServer,
    model::{NumberOrString, PingRequest, ProgressNotificationParam, ProgressToken, ServerRequest},
    service::{PeerRequestOptions, RequestContext, ServiceError},
};
use serde_json::Value;
use tokio::sync::{Notify, mpsc};

use crate::{
    setup::{Plan, Scripted, Server, Setup, arguments, stalled},
    support::*,
};

/// The progress token of the last thing that a handler sends.
const LAST: &str = "last";

#[tokio::test]
async fn with_the_wrapper_nothing_of_a_cancelled_call_comes_out() {
    let (handler, mut refusals) = nagging();
    let setup = Plan::of(Server::Wrapped).start_scripted(handler).await;
    let mcp = setup.mcp().await;
    let mut standalone = standalone(&mcp).await;

    setup.start_call(&mcp, 7, "any", "cancelled").await.fin();

    assert!(setup.witness.ended("cancelled").await.is_completed());
    let refused = within("the fate of its request", refusals.recv()).await;
    let error = refused.expect("the handler tells it");
    assert!(error.contains("the call is cancelled"), "{error}");
    assert_eq!(until_last(&mut standalone).await, [] as [Value; 0]);
    assert_others_are_heard(&setup, &mcp, &mut standalone).await;
}

/// The control: without the wrapper the same handler is heard.
#[tokio::test]
async fn bare_rmcp_lets_out_what_a_cancelled_call_still_sends() {
    let (handler, _refusals) = nagging();
    let setup = Plan::of(Server::Bare).start_scripted(handler).await;
    let mcp = setup.mcp().await;
    let mut standalone = standalone(&mcp).await;
    let _call = setup.start_call(&mcp, 7, "any", "cancelled").await;

    // Nobody cancels on a hang-up here, so the client says it.
    assert_eq!(mcp.cancel(7).await, 202);

    let [progress, request] = &until_last(&mut standalone).await[..] else {
        panic!("progress and a request come out");
    };
    assert_eq!(progress["method"], "notifications/progress");
    assert_eq!(progress["params"]["progressToken"], 7);
    assert_eq!(request["method"], "ping");
}

/// The answer had passed the session's transport when the call was cancelled: it waits behind a stream that nobody
/// reads, and so does the cancel. Which of the two the session takes first is left to chance.
#[tokio::test]
async fn an_answer_that_was_on_its_way_at_the_cancel_does_not_come_out() {
    for round in 0..12 {
        let (setup, answers) = blockable().await;
        let mcp = setup.mcp().await;
        let mut standalone = standalone(&mcp).await;
        let call = setup.start_call(&mcp, 7, "any", "answering").await;
        let blocker = setup.start_call(&mcp, 8, "any", "blocking").await;
        settle().await;
        answers.notify_one();
        assert!(setup.witness.ended("answering").await.is_completed());
        settle().await;

        call.fin();
        setup.events.ended(&mcp, 7).await;
        settle().await;
        blocker.fin();
        setup.events.ended(&mcp, 8).await;

        setup.assert_usable(&mcp).await;
        mcp.call(9, "any", arguments("last"))
            .await
            .answer()
            .await
            .expect("an answer");
        let late = until_last(&mut standalone).await;
        assert_eq!(late, [] as [Value; 0], "round {round}");
    }
}

/// A session whose worker one call can block: its channels hold one message, and streams are not read inside the layer.
/// With what lets the other call answer.
async fn blockable() -> (Setup, Arc<Notify>) {
    let answers = Arc::new(Notify::new());
    let cue = answers.clone();
    let handler = Scripted::labelled(move |label, context| {
        let cue = cue.clone();
        async move {
            match &*label {
                "answering" => cue.notified().await,
                "blocking" => loop {
                    let own = context.meta.get_progress_token().expect("a progress token");
                    progress(&context, own).await.expect("sent");
                },
                _ => last(&context).await.expect("sent"),
            }
            Ok("done".to_owned())
        }
    });
    let plan = Plan::of(Server::Wrapped)
        .inside(stalled)
        .sessions(|mut local| {
            local.session_config.channel_capacity = 1;
            local
        });
    (plan.start_scripted(handler).await, answers)
}

/// Lets everything come as far as it can.
async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// A handler that ignores its token: cancelled, it sends progress and a request to its client, and then
/// [`LAST`] under a token that no call has. With what becomes of its request.
///
/// Only the call with the id 7 waits for its cancel; the others send [`LAST`] alone.
fn nagging() -> (Scripted, mpsc::UnboundedReceiver<String>) {
    let (refusals, refused) = mpsc::unbounded_channel();
    let handler = Scripted::new(move |context| {
        let refusals = refusals.clone();
        async move {
            if context.id == NumberOrString::Number(7) {
                context.ct.cancelled().await;
                let fate = nag(&context).await.expect_err("nobody answers it");
                refusals.send(fate.to_string()).expect("the test listens");
            } else {
                last(&context).await.expect("sent");
            }
            Ok("done".to_owned())
        }
    });
    (handler, refused)
}

/// Sends all of it, and waits for the answer to the request.
async fn nag(context: &RequestContext<RoleServer>) -> Result<(), ServiceError> {
    let own = context.meta.get_progress_token().expect("a progress token");
    progress(context, own).await?;
    let ping = PingRequest {
        method: Default::default(),
        extensions: Default::default(),
    };
    let request = ServerRequest::PingRequest(ping);
    let options = PeerRequestOptions::no_options();
    let sent = context.peer.send_request_with_option(request, options);
    let answer = sent.await?;
    last(context).await?;
    answer.await_response().await.map(drop)
}

async fn last(context: &RequestContext<RoleServer>) -> Result<(), ServiceError> {
    progress(context, ProgressToken(NumberOrString::String(LAST.into()))).await
}

async fn progress(
    context: &RequestContext<RoleServer>,
    token: ProgressToken,
) -> Result<(), ServiceError> {
    let progress = ProgressNotificationParam::new(token, 1.0);
    context.peer.notify_progress(progress).await
}

/// The session's standalone stream, ready to carry messages.
async fn standalone(mcp: &Mcp) -> Connection {
    let mut stream = mcp.listen().await;
    assert_eq!(stream.head().await.status, 200);
    assert!(stream.event().await.expect("an event").is_priming());
    stream
}

/// What comes before [`LAST`].
async fn until_last(stream: &mut Connection) -> Vec<Value> {
    let mut messages = Vec::new();
    loop {
        let message = stream.event().await.expect("the stream goes on").json();
        if message["params"]["progressToken"] == LAST {
            return messages;
        }
        messages.push(message);
    }
}

/// The session's other calls are heard, and nothing came late.
async fn assert_others_are_heard(setup: &Setup, mcp: &Mcp, standalone: &mut Connection) {
    let mut other = setup.start_call(mcp, 8, "any", "other").await;
    let answer = other.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "done");
    assert_eq!(until_last(standalone).await, [] as [Value; 0]);
}
