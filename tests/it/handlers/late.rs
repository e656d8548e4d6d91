//! Messages sent after a call has been cancelled, by a handler that ignores its token.
//!
//! The wrapper suppresses them. Bare rmcp delivers them on the session's standalone stream.

use std::{sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::{Limits, observe::Limit};
use rmcp::{
    RoleServer,
    model::{NumberOrString, PingRequest, ProgressNotificationParam, ProgressToken, ServerRequest},
    service::{PeerRequestOptions, RequestContext, ServiceError},
};
use serde_json::Value;
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc},
};

use crate::{
    setup::{EventKind, Plan, Scripted, Server, Setup, StoppedClock, arguments, stalled},
    support::*,
};

/// The progress token in the last message that a handler sends.
const LAST: &str = "last";

#[tokio::test]
async fn with_the_wrapper_no_message_of_a_cancelled_call_is_sent() {
    let (handler, mut refusals) = late_sender();
    let setup = Plan::of(Server::Wrapped).start_scripted(handler).await;
    let mcp = setup.mcp().await;
    let mut standalone = standalone(&mcp).await;

    setup.start_call(&mcp, 7, "any", "cancelled").await.fin();

    assert!(setup.witness.ended("cancelled").await.is_completed());
    let refused = within("the result of its request", refusals.recv()).await;
    let error = refused.expect("the handler reports the error");
    assert!(error.contains("the call was cancelled"), "{error}");
    assert_eq!(until_last(&mut standalone).await, [] as [Value; 0]);
    assert_others_are_delivered(&setup, &mcp, &mut standalone).await;
}

/// The control. Without the wrapper, the same handler's messages are delivered.
#[tokio::test]
async fn bare_rmcp_sends_the_messages_of_a_cancelled_call() {
    let (handler, _refusals) = late_sender();
    let setup = Plan::of(Server::Bare).start_scripted(handler).await;
    let mcp = setup.mcp().await;
    let mut standalone = standalone(&mcp).await;
    let _call = setup.start_call(&mcp, 7, "any", "cancelled").await;

    // A disconnect does not cancel anything here, so the client sends a cancellation.
    assert_eq!(mcp.cancel(7).await, 202);

    let [progress, request] = &until_last(&mut standalone).await[..] else {
        panic!("progress and a request are sent");
    };
    assert_eq!(progress["method"], "notifications/progress");
    assert_eq!(progress["params"]["progressToken"], 7);
    assert_eq!(request["method"], "ping");
}

/// The answer has already passed the session's transport when the call is cancelled.
///
/// Both the answer and the cancellation are waiting behind an unread stream, and which of them the session handles first is
/// random.
#[tokio::test]
async fn an_answer_that_was_queued_at_the_cancel_is_not_sent() {
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

/// rmcp removes a progress token's route when the first of its calls ends.
///
/// From then on, even bare rmcp sends the progress on the session's standalone stream.
#[tokio::test]
async fn a_call_that_reuses_the_progress_token_of_a_cancelled_one_gets_its_progress() {
    for server in [Server::Wrapped, Server::Bare] {
        let (handler, proceed) = progressing();
        let setup = Plan::of(server).start_scripted(handler).await;
        let mcp = setup.mcp().await;
        let mut standalone = standalone(&mcp).await;
        let older = with_token(&setup, &mcp, 7, "older").await;
        let mut newer = with_token(&setup, &mcp, 8, "newer").await;

        end(&setup, &mcp, older).await;
        proceed.notify_one();

        let [progress] = &until_last(&mut standalone).await[..] else {
            panic!("the progress is sent, {server:?}");
        };
        assert_eq!(progress["params"]["progressToken"], "shared", "{server:?}");
        let answer = newer.answer().await.expect("an answer");
        assert_eq!(answer["result"]["content"][0]["text"], "done", "{server:?}");
    }
}

#[tokio::test]
async fn a_call_that_is_not_tracked_gets_the_progress_under_the_token_of_a_cancelled_one() {
    for server in [Server::Wrapped, Server::Bare] {
        let (handler, proceed) = progressing();
        let plan = Plan::of(server).layer(|layer| layer.limits(Limits::default().calls(1)));
        let setup = plan.start_scripted(handler).await;
        let mcp = setup.mcp().await;
        let older = with_token(&setup, &mcp, 7, "older").await;
        end(&setup, &mcp, older).await;
        let _tracked = setup.start_call(&mcp, 9, "any", "older").await;
        let mut newer = with_token(&setup, &mcp, 8, "newer").await;
        if server == Server::Wrapped {
            assert_eq!(setup.calls.len(), 1);
            assert_eq!(
                setup.events.of(&mcp, 8),
                [EventKind::Untracked(Limit::Calls)]
            );
        }

        proceed.notify_one();

        let messages = newer.messages().await;
        let [progress, answer] = &messages[..] else {
            panic!("progress and an answer, {server:?}: {messages:?}");
        };
        assert_eq!(progress["params"]["progressToken"], "shared", "{server:?}");
        assert_eq!(answer["result"]["content"][0]["text"], "done", "{server:?}");
    }
}

/// Returns a handler that waits for its cancellation, or for the notice if its label is `newer`.
///
/// After the notice it sends progress under its call's token, and then [`LAST`].
fn progressing() -> (Scripted, Arc<Notify>) {
    let proceed = Arc::new(Notify::new());
    let notice = proceed.clone();
    let handler = Scripted::labelled(move |label, context| {
        let notice = notice.clone();
        async move {
            if label == "newer" {
                notice.notified().await;
                let own = context.meta.get_progress_token().expect("a progress token");
                progress(&context, own).await.expect("sent");
                last(&context).await.expect("sent");
            } else {
                context.ct.cancelled().await;
            }
            Ok("done".to_owned())
        }
    });
    (handler, proceed)
}

/// Starts a call whose progress token is `shared`.
async fn with_token(setup: &Setup, mcp: &Mcp, id: u64, label: &str) -> Connection {
    let mut message = mcp.call_message(id, "any", arguments(label));
    message["params"]["_meta"]["progressToken"] = "shared".into();
    let call = mcp.send(&mcp.message_request(&message)).await;
    setup.witness.started(label).await;
    call
}

/// Cancels call 7, labelled `older`.
///
/// It is cancelled by a disconnect, or by its client's notification on bare rmcp.
async fn end(setup: &Setup, mcp: &Mcp, call: Connection) {
    if setup.server == Server::Bare {
        assert_eq!(mcp.cancel(7).await, 202);
    }
    call.fin();
    assert!(setup.witness.ended("older").await.is_completed());
    if setup.server == Server::Wrapped {
        setup.events.ended(mcp, 7).await;
    }
}

/// rmcp's worker handles nothing while one of its session's streams is full and unread.
#[tokio::test]
async fn a_call_with_the_id_of_one_whose_cancel_was_never_accepted_gets_its_answer() {
    let clock = StoppedClock::stop();
    let (setup, answers) = blockable().await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 7, "any", "answering").await;
    let blocker = setup.start_call(&mcp, 8, "any", "blocking").await;
    settle().await;
    let fillers = [90, 91, 92].map(|id| {
        let mcp = mcp.clone();
        Handle::current().spawn(async move { mcp.cancel(id).await })
    });
    settle().await;

    call.fin();
    setup.events.ended(&mcp, 7).await;
    clock.advance_past(Duration::from_secs(10)).await;
    let failed = |kind| kind == EventKind::CancelFailed(None);
    setup.events.count(&mcp, 7, 1, failed).await;
    blocker.fin();
    setup.events.ended(&mcp, 8).await;
    for filler in fillers {
        assert_eq!(filler.await.expect("no panic"), 202);
    }
    answers.notify_one();
    assert!(setup.witness.ended("answering").await.is_completed());

    let mut later = mcp.call(7, "any", arguments("later")).await;
    let answer = later.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "done");
}

/// Starts a server on which one call can block its session's worker.
///
/// The session's channels hold a single message, and streams are not read inside the layer. Also returns the notice
/// that lets the other call answer.
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

/// Yields until every task has got as far as it can.
async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// Returns a handler that ignores its token.
///
/// After its cancellation it sends progress, a request to its client, and finally [`LAST`] under a token that is not any
/// call's. Also returns a channel with the error for that request.
///
/// Only call 7 waits for its cancellation. Other calls just send [`LAST`].
fn late_sender() -> (Scripted, mpsc::UnboundedReceiver<String>) {
    let (refusals, refused) = mpsc::unbounded_channel();
    let handler = Scripted::new(move |context| {
        let refusals = refusals.clone();
        async move {
            if context.id == NumberOrString::Number(7) {
                context.ct.cancelled().await;
                let error = send_late(&context).await.expect_err("the request fails");
                refusals
                    .send(error.to_string())
                    .expect("the test is listening");
            } else {
                last(&context).await.expect("sent");
            }
            Ok("done".to_owned())
        }
    });
    (handler, refused)
}

/// Sends a [`late_sender`]'s messages and waits for the answer to its request.
async fn send_late(context: &RequestContext<RoleServer>) -> Result<(), ServiceError> {
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

/// Opens the session's standalone stream, ready to carry messages.
async fn standalone(mcp: &Mcp) -> Connection {
    let mut stream = mcp.listen().await;
    assert_eq!(stream.head().await.status, 200);
    assert!(stream.event().await.expect("an event").is_priming());
    stream
}

/// Returns the messages before [`LAST`].
async fn until_last(stream: &mut Connection) -> Vec<Value> {
    let mut messages = Vec::new();
    loop {
        let message = stream.event().await.expect("the stream stays open").json();
        if message["params"]["progressToken"] == LAST {
            return messages;
        }
        messages.push(message);
    }
}

/// Asserts that messages from the session's other calls are delivered.
///
/// No late message may have been delivered.
async fn assert_others_are_delivered(setup: &Setup, mcp: &Mcp, standalone: &mut Connection) {
    let mut other = setup.start_call(mcp, 8, "any", "other").await;
    let answer = other.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "done");
    assert_eq!(until_last(standalone).await, [] as [Value; 0]);
}
