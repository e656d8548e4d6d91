//! A handler sends its client a request (sampling, elicitation or roots) and waits.
//!
//! If its call is cancelled, no answer will arrive. With the wrapper, the request fails at once, so the handler does
//! not need to check its token.

use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use rmcp::{
    RoleServer,
    model::{ErrorCode, ServerRequest},
    service::{PeerRequestOptions, RequestContext, ServiceError},
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::{
    setup::{Plan, Scripted, Server, Setup},
    support::*,
};

/// The requests that handlers send, each for the label of the same name.
const REQUESTS: [&str; 3] = ["sampling/createMessage", "elicitation/create", "roots/list"];

/// Each request's result, with its call's label.
type Results = mpsc::UnboundedReceiver<(String, Result<Value, ServiceError>)>;

#[tokio::test]
async fn a_request_to_a_client_fails_when_the_client_disconnects() {
    let (setup, mut results) = start(Server::Wrapped).await;
    let mcp = setup.mcp().await;
    for (id, method) in (1..).zip(REQUESTS) {
        let (call, _) = start_until_request(&setup, &mcp, id, method).await;

        call.fin();

        assert_cancelled(result_of(&mut results, method).await);
        assert!(setup.witness.ended(method).await.is_completed());
        let reason = CancelReason::ClientDisconnected;
        assert_eq!(
            setup.events.ended(&mcp, id).await,
            Outcome::Cancelled(reason)
        );
    }
    setup.assert_usable(&mcp).await;
}

#[tokio::test]
async fn a_request_to_a_client_fails_when_the_client_cancels() {
    let (setup, mut results) = start(Server::Wrapped).await;
    let mcp = setup.mcp().await;
    let (_call, _) = start_until_request(&setup, &mcp, 1, "roots/list").await;

    assert_eq!(mcp.cancel(1).await, 202);

    assert_cancelled(result_of(&mut results, "roots/list").await);
}

/// Without the wrapper the handler waits forever, although its call has been cancelled.
#[tokio::test]
async fn without_the_wrapper_a_request_to_a_client_waits_forever() {
    for server in [Server::Bare, Server::LayerOnly] {
        let (setup, mut results) = start(server).await;
        let mcp = setup.mcp().await;
        let (call, _) = start_until_request(&setup, &mcp, 1, "roots/list").await;

        if server == Server::LayerOnly {
            call.fin();
            setup.events.ended(&mcp, 1).await;
        } else {
            assert_eq!(mcp.cancel(1).await, 202);
        }

        setup.assert_usable(&mcp).await;
        assert!(results.try_recv().is_err());
        assert!(setup.witness.is_running("roots/list"));
    }
}

#[tokio::test]
async fn an_answer_that_arrives_too_late_is_ignored() {
    let (setup, mut results) = start(Server::Wrapped).await;
    let mcp = setup.mcp().await;
    let (call, request) = start_until_request(&setup, &mcp, 1, "roots/list").await;
    call.fin();
    assert_cancelled(result_of(&mut results, "roots/list").await);

    assert_eq!(reply(&mcp, &request).await, 202);

    setup.assert_usable(&mcp).await;
    assert!(results.try_recv().is_err());
}

#[tokio::test]
async fn the_requests_of_other_calls_still_reach_their_clients() {
    let (setup, mut results) = start(Server::Wrapped).await;
    let mcp = setup.mcp().await;
    let (disconnecting, _) = start_until_request(&setup, &mcp, 1, "roots/list").await;
    let (mut connected, request) = start_until_request(&setup, &mcp, 2, "elicitation/create").await;

    disconnecting.fin();

    assert_cancelled(result_of(&mut results, "roots/list").await);
    assert!(setup.witness.is_running("elicitation/create"));
    assert_eq!(reply(&mcp, &request).await, 202);
    let answered = result_of(&mut results, "elicitation/create").await;
    assert_eq!(answered.expect("an answer"), json!({ "action": "decline" }));
    let answer = connected.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "asked");
}

/// A request that a call sends after it has been cancelled is refused.
#[tokio::test]
async fn a_cancelled_call_cannot_send_a_request_to_its_client() {
    let (sender, mut refused) = mpsc::unbounded_channel();
    let handler = Scripted::new(move |context| {
        let sender = sender.clone();
        async move {
            context.ct.cancelled().await;
            let answer = send_request(&context, "roots/list").await;
            sender
                .send(answer.expect_err("the request fails"))
                .expect("the test is listening");
            Ok("asked".to_owned())
        }
    });
    let setup = Plan::of(Server::Wrapped).start_scripted(handler).await;
    let mcp = setup.mcp().await;

    setup.start_call(&mcp, 1, "any", "a").await.fin();

    let error = within("the refusal", refused.recv()).await.expect("sent");
    assert!(
        error.to_string().contains("the call was cancelled"),
        "{error}"
    );
}

/// Starts a server whose handlers send the request named by their label.
///
/// They report its result.
async fn start(server: Server) -> (Setup, Results) {
    let (sender, results) = mpsc::unbounded_channel();
    let handler = Scripted::labelled(move |label, context| {
        let sender = sender.clone();
        async move {
            if REQUESTS.contains(&&*label) {
                let result = send_request(&context, &label).await;
                // The test might have dropped its receiver.
                let _ = sender.send((label, result));
            }
            Ok("asked".to_owned())
        }
    });
    (Plan::of(server).start_scripted(handler).await, results)
}

/// Starts a call and waits until its handler has sent its client a request.
///
/// Returns the connection and the request.
async fn start_until_request(
    setup: &Setup,
    mcp: &Mcp,
    id: i64,
    method: &str,
) -> (Connection, Value) {
    let mut call = setup.start_call(mcp, id, "any", method).await;
    call.head().await;
    loop {
        let event = call.event().await.expect("the request");
        if !event.is_priming() {
            let message = event.json();
            assert_eq!(message["method"], method);
            return (call, message);
        }
    }
}

async fn send_request(
    context: &RequestContext<RoleServer>,
    method: &str,
) -> Result<Value, ServiceError> {
    let params = match method {
        "sampling/createMessage" => json!({ "messages": [], "maxTokens": 1 }),
        "elicitation/create" => json!({
            "mode": "form",
            "message": "Sure?",
            "requestedSchema": { "type": "object", "properties": {} },
        }),
        _ => json!({}),
    };
    let request = json!({ "method": method, "params": params });
    let request: ServerRequest = serde_json::from_value(request).expect("a request");
    let options = PeerRequestOptions::no_options();
    let sent = context.peer.send_request_with_option(request, options);
    let answer = sent.await?.await_response().await?;
    Ok(serde_json::to_value(answer).expect("JSON"))
}

/// Sends the client's answer to the request.
async fn reply(mcp: &Mcp, request: &Value) -> u16 {
    let answer = json!({
        "jsonrpc": "2.0",
        "id": request["id"],
        "result": { "action": "decline" },
    });
    mcp.post_raw(answer.to_string(), &[]).await.status
}

async fn result_of(results: &mut Results, method: &str) -> Result<Value, ServiceError> {
    let (label, result) = within("a request's result", results.recv())
        .await
        .expect("a report");
    assert_eq!(label, method);
    result
}

fn assert_cancelled(result: Result<Value, ServiceError>) {
    match result {
        Err(ServiceError::McpError(error)) => {
            assert_eq!(error.code, ErrorCode(-32_800));
            assert_eq!(error.message, "Request cancelled");
        }
        other => panic!("not cancelled: {other:?}"),
    }
}
