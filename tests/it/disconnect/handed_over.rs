//! A call on its way to the session manager, and what can happen before it gets there.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
};
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome, Policy};
use serde_json::json;
use tokio::sync::{Notify, mpsc};

use crate::{
    setup::{DISCONNECTED, EXCHANGE, EventKind, GRACE, Plan, Server, Setup, arguments, slow_auth},
    support::*,
};

/// A service inside the layer that serves each request in its own task.
///
/// A disconnect does not drop such a task.
struct Spawning {
    asked: mpsc::UnboundedReceiver<()>,
    proceed: Arc<Notify>,
}

impl Spawning {
    /// Makes calls wait until the test lets them pass, either before or after their body is read.
    fn plan(reads_first: bool) -> (Plan, Self) {
        let proceed = Arc::new(Notify::new());
        let (ask, asked) = mpsc::unbounded_channel();
        let waits = proceed.clone();
        let spawning = move |router: Router| {
            router.layer(from_fn(move |request: Request, next: Next| {
                let (waits, ask) = (waits.clone(), ask.clone());
                async move {
                    if !request.headers().contains_key(EXCHANGE) {
                        return next.run(request).await;
                    }
                    let (parts, body) = request.into_parts();
                    let body = if reads_first {
                        Body::from(to_bytes(body, usize::MAX).await.expect("a body"))
                    } else {
                        body
                    };
                    let request = Request::from_parts(parts, body);
                    let served = async move {
                        ask.send(()).expect("the test is listening");
                        waits.notified().await;
                        next.run(request).await
                    };
                    spawn(served).await
                }
            }))
        };
        let plan = Plan::of(Server::Wrapped).inside(spawning);
        (plan, Self { asked, proceed })
    }
}

#[allow(clippy::disallowed_methods, reason = "the test needs its own task")]
async fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> T {
    tokio::spawn(task).await.expect("the task does not panic")
}

#[tokio::test]
async fn a_call_whose_client_disconnected_before_it_reached_its_session_is_cancelled_in_it() {
    for reads_first in [false, true] {
        let (plan, mut spawning) = Spawning::plan(reads_first);
        let (setup, mcp) = plan.client().await;
        let marked = mcp.clone().header(EXCHANGE, "a");
        let call = marked.call(1, "hold", arguments("a")).await;
        within("the call to arrive", spawning.asked.recv()).await;
        call.fin();
        setup.exchanges.over_for("a").await;

        spawning.proceed.notify_one();

        setup.witness.started("a").await;
        assert!(
            setup.witness.ended("a").await.is_cancelled(),
            "{reads_first}"
        );
        assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
        let events = setup.events.of(&mcp, 1);
        assert_eq!(events, [EventKind::Started, EventKind::Ended(DISCONNECTED)]);
        assert!(setup.calls.is_empty());
        setup.assert_usable(&mcp).await;
    }
}

#[tokio::test]
async fn a_call_that_was_cancelled_before_it_reached_its_session_is_cancelled_in_it() {
    let (plan, mut spawning) = Spawning::plan(true);
    let (setup, mcp) = plan.grace(Grace::After(GRACE)).client().await;
    let marked = mcp.clone().header(EXCHANGE, "a");
    let mut call = marked.call(1, "hold", arguments("a")).await;
    within("the call to arrive", spawning.asked.recv()).await;
    setup.events.started(&mcp, 1).await;
    let id = setup.calls.snapshot()[0].info().id();

    assert!(setup.calls.cancel(id, CancelReason::Requested));
    spawning.proceed.notify_one();

    let messages = call.messages().await;
    assert_eq!(messages[0]["error"]["code"], -32800);
    setup.witness.started("a").await;
    assert!(setup.witness.ended("a").await.is_cancelled());
}

/// `has_session` waits for rmcp's lock while the body is being read.
#[tokio::test]
async fn a_call_that_waits_for_its_session_still_supersedes() {
    let (setup, mcp) = superseding().client().await;
    setup.cut(&mcp, 1, "a").await;

    let _newer = wait_for_its_session(&setup, &mcp, 2, "a").await;

    let superseded = Outcome::Cancelled(CancelReason::Superseded);
    assert_eq!(setup.events.ended(&mcp, 1).await, superseded);
}

#[tokio::test]
async fn a_call_that_waited_for_its_session_is_still_superseded() {
    let (setup, mcp) = superseding().client().await;
    let mut older = wait_for_its_session(&setup, &mcp, 1, "a").await;
    older.head().await;
    older.event().await.expect("the priming event");
    older.fin();
    setup.events.detached(&mcp, 1).await;

    let _newer = mcp.call(2, "hold", arguments("a")).await;

    let superseded = Outcome::Cancelled(CancelReason::Superseded);
    assert_eq!(setup.events.ended(&mcp, 1).await, superseded);
}

/// Sends a call while rmcp's sessions are locked.
///
/// Waits until the layer knows the call from its body.
async fn wait_for_its_session(setup: &Setup, mcp: &Mcp, id: u64, label: &str) -> Connection {
    let locked = setup.sessions.local().sessions.write().await;
    let call = mcp.call(id, "hold", arguments(label)).await;
    setup.events.started(mcp, id).await;
    drop(locked);
    setup.witness.started(label).await;
    call
}

fn superseding() -> Plan {
    Plan::of(Server::Wrapped)
        .layer(|layer| layer.policy(|_| Policy::new().grace(Grace::After(GRACE)).supersede()))
}

/// A message that does not look like a call belongs to no session manager, so it passes.
#[tokio::test]
async fn a_notification_passes_a_service_that_spawns() {
    let (plan, mut spawning) = Spawning::plan(true);
    let (_setup, mcp) = plan.client().await;
    let marked = mcp.clone().header(EXCHANGE, "n");
    let (status, ()) = tokio::join!(
        marked.notify("notifications/roots/list_changed", json!({})),
        async {
            within("the notification to arrive", spawning.asked.recv()).await;
            spawning.proceed.notify_one();
        }
    );
    assert_eq!(status, 202);
}

/// The layer has read the body before the manager gets the message.
///
/// By then rmcp has removed the parameter from the message.
#[tokio::test]
async fn a_request_with_a_task_is_a_call_like_any_other_though_its_body_was_read_before() {
    for plan in [
        Plan::of(Server::Wrapped),
        Plan::of(Server::Wrapped).inside(slow_auth),
    ] {
        let (setup, mcp) = plan.client().await;
        let mut message = mcp.call_message(1, "hold", arguments("a"));
        message["params"]["task"] = json!({ "ttl": 60_000 });
        let mut call = mcp.send(&mcp.message_request(&message)).await;
        setup.witness.started("a").await;
        call.head().await;

        call.fin();

        assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
        assert!(setup.witness.ended("a").await.is_cancelled());
    }
}

#[tokio::test]
async fn a_request_with_a_task_times_out_though_its_body_was_read_before() {
    let plan = Plan::of(Server::Wrapped).inside(slow_auth);
    let plan = plan.layer(|layer| layer.call_timeout(Duration::from_millis(200)));
    let (_setup, mcp) = plan.client().await;
    let mut message = mcp.call_message(1, "hold", arguments("a"));
    message["params"]["task"] = json!({ "ttl": 60_000 });

    let mut call = mcp.send(&mcp.message_request(&message)).await;

    let answer = call.answer().await.expect("an error");
    assert_eq!(answer["error"]["code"], -32001);
}

/// A middleware has read the stream's opening event but has not passed it on to the client.
#[tokio::test]
async fn there_is_no_grace_for_a_client_that_received_no_event() {
    let buffering = |router: Router| {
        router.layer(from_fn(async |request: Request, next: Next| {
            let (head, body) = next.run(request).await.into_parts();
            let body = to_bytes(body, usize::MAX).await.expect("a body");
            axum::response::Response::from_parts(head, Body::from(body))
        }))
    };
    for server in [Server::Wrapped, Server::LayerOnly] {
        let plan = Plan::of(server).grace(Grace::Auto).inside(buffering);
        let (setup, mcp) = plan.client().await;
        let call = setup.start_call(&mcp, 1, "hold", "a").await;

        call.fin();

        assert_eq!(
            setup.events.ended(&mcp, 1).await,
            DISCONNECTED,
            "{server:?}"
        );
    }
}
