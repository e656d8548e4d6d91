//! A cancelled handler gets some time to end on its own before it is dropped.

use std::{collections::BTreeSet, time::Duration};

use mcp_cancel_on_disconnect::{AbortOnCancel, Grace};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{CallToolRequestParams, CallToolResponse},
    service::RequestContext,
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::yield_now};
use tokio_util::sync::CancellationToken;

use super::{
    recorder::{Recorder, requests},
    wire::Wire,
};
use crate::{
    setup::{FIRST_STORED, Plan, Scripted, Server, StoppedClock, for_servers},
    support::{server::report, *},
};

/// Long enough for a handler that ends on its own.
const WINDOW: Duration = Duration::from_secs(5);

/// The error code for a cancelled request.
const REQUEST_CANCELLED: i64 = -32_800;

for_servers!([wrapped = Wrapped, layer_only = LayerOnly, sse = StatelessSse, json = StatelessJson] {
    a_handler_that_ignores_its_token_is_dropped,
    a_handler_that_heeds_its_token_ends_by_itself,
    a_handler_that_completes_is_not_affected,
    a_panic_is_an_error_for_its_client_alone,
});

async fn a_handler_that_ignores_its_token_is_dropped(server: Server) {
    let plan = Plan::of(server).abort_after(Duration::ZERO);
    let (setup, mcp) = plan.client().await;
    let call = setup.start_call(&mcp, 1, "stubborn", "a").await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_dropped());
    setup.assert_usable(&mcp).await;
}

async fn a_handler_that_heeds_its_token_ends_by_itself(server: Server) {
    let (setup, mcp) = Plan::of(server).abort_after(WINDOW).client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_handler_that_completes_is_not_affected(server: Server) {
    let plan = Plan::of(server).abort_after(Duration::ZERO);
    let (setup, mcp) = plan.client().await;
    let mut call = setup.start_call(&mcp, 1, "stubborn", "a").await;

    setup.assert_completes("a", &mut call).await;
}

async fn a_panic_is_an_error_for_its_client_alone(server: Server) {
    let (setup, mcp) = Plan::of(server).abort_after(WINDOW).client().await;
    let mut other = setup.start_call(&mcp, 1, "hold", "other").await;

    let mut call = mcp.call(2, "boom", json!({})).await;

    let answer = call.answer().await.expect("an answer");
    assert_eq!(answer["id"], 2);
    assert_eq!(answer["error"]["code"], -32_603, "{answer}");
    assert!(setup.witness.ended("boom").await.is_dropped());
    setup.assert_completes("other", &mut other).await;
}

/// Without a session, rmcp fires the context's token as soon as the stream is dropped, but this must not stop the handler.
#[tokio::test]
async fn a_call_that_no_disconnect_cancels_runs_on_without_a_session() {
    for server in [Server::Wrapped, Server::StatelessSse, Server::StatelessJson] {
        for is_exempt in [true, false] {
            let plan = Plan::of(server).abort_after(Duration::ZERO);
            let plan = if is_exempt {
                plan.layer(|layer| layer.exempt(|call| call.tool() == Some("stubborn")))
            } else {
                plan.grace(Grace::Never)
            };
            let setup = plan.start().await;
            let mcp = Mcp::sessionless(setup.served.addr, PATH);
            setup.start_call(&mcp, 1, "stubborn", "a").await.fin();
            setup.witness.token_fired("a").await;
            setup.exchanges.over_for("a").await;

            setup.witness.release("a");

            let end = setup.witness.ended("a").await;
            assert!(end.is_completed(), "{server:?}, exempt: {is_exempt}");
        }
    }
}

/// rmcp also fires the token when the server shuts down, and then no client has disconnected.
#[tokio::test]
async fn a_call_that_no_disconnect_cancels_stops_with_its_server() {
    for server in [Server::StatelessSse, Server::StatelessJson] {
        let shutdown = CancellationToken::new();
        let token = shutdown.clone();
        let plan = Plan::of(server).abort_after(Duration::ZERO);
        let plan = plan
            .grace(Grace::Never)
            .config(|config| config.with_cancellation_token(token));
        let (setup, mcp) = plan.client().await;
        let _call = setup.start_call(&mcp, 1, "stubborn", "a").await;

        shutdown.cancel();

        assert!(setup.witness.ended("a").await.is_dropped(), "{server:?}");
    }
}

/// The time limit of such a call applies even after its stream has been dropped.
#[tokio::test]
async fn a_call_that_no_disconnect_cancels_is_dropped_once_it_times_out() {
    let plan = Plan::of(Server::StatelessSse)
        .abort_after(Duration::ZERO)
        .layer(|layer| layer.grace(Grace::Never).call_timeout(WINDOW));
    let (clock, setup, mcp) = plan.stopped().await;
    setup.start_call(&mcp, 1, "stubborn", "a").await.fin();
    setup.witness.token_fired("a").await;
    assert!(setup.witness.is_running("a"));

    clock.advance(2 * WINDOW).await;

    assert!(setup.witness.ended("a").await.is_dropped());
}

/// Even without any time to end, a handler can see that its token has fired.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_being_polled_when_it_is_cancelled_is_polled_once_more() {
    let (saw_cancel, mut seen) = mpsc::unbounded_channel();
    let handler = Scripted::new(move |context| {
        let saw_cancel = saw_cancel.clone();
        async move {
            while !context.ct.is_cancelled() {
                std::thread::yield_now();
            }
            yield_now().await;
            saw_cancel.send(()).expect("the test is running");
            Ok("cleaned up".to_owned())
        }
    });
    let plan = Plan::of(Server::Wrapped).abort_after(Duration::ZERO);
    let setup = plan.start_scripted(handler).await;
    let mcp = setup.mcp().await;

    setup.start_call(&mcp, 1, "any", "a").await.fin();

    within("the last poll", seen.recv()).await.expect("a poll");
}

/// The control for all of these tests.
#[tokio::test]
async fn bare_rmcp_lets_a_stubborn_handler_run() {
    let (clock, setup, mcp) = Server::Wrapped.stopped().await;
    setup.start_call(&mcp, 1, "stubborn", "a").await.fin();
    setup.witness.token_fired("a").await;

    clock.advance(WINDOW).await;

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
}

#[tokio::test]
async fn the_abort_grace_is_a_second_unless_it_is_set() {
    let clock = StoppedClock::stop();
    for (window, expected) in [(None, 1_000), (Some(Duration::from_millis(200)), 200)] {
        let witness = Witness::new();
        let handler = AbortOnCancel::new(Tools::new(&witness));
        let mut wire = Wire::to(match window {
            Some(window) => handler.after(window),
            None => handler,
        });
        wire.start_stubborn(&witness, "a").await;
        wire.cancel(1);
        witness.token_fired("a").await;

        clock.advance(Duration::from_millis(expected - 1)).await;
        wire.assert_usable().await;
        assert!(witness.is_running("a"));

        clock.advance(Duration::from_millis(2)).await;
        assert!(witness.ended("a").await.is_dropped());
    }
}

/// Checks whether each method may be stopped.
#[tokio::test]
async fn only_requests_without_side_effects_are_stopped() {
    let mut dropped = BTreeSet::new();
    let mut running = BTreeSet::new();
    for (method, params, name) in requests() {
        let recorder = Recorder::stuck();
        let log = recorder.log().clone();
        let mut wire = Wire::to(AbortOnCancel::new(recorder).after(Duration::ZERO));
        wire.request(1, method, params);
        let started = async {
            while !log.has_started(name) {
                tokio::task::yield_now().await;
            }
        };
        within(name, started).await;
        wire.cancel(1);
        // By then a handler that is meant to be dropped has been, because its task is woken before the answering task.
        wire.assert_usable().await;
        if log.was_dropped(name) {
            dropped.insert(name)
        } else {
            running.insert(name)
        };
    }
    let stopped = [
        "call_tool",
        "complete",
        "discover",
        "get_prompt",
        "get_skill",
        "list_prompts",
        "list_resource_templates",
        "list_resources",
        "list_skills",
        "list_tools",
        "on_custom_request",
        "read_resource",
        "read_resource_directory",
    ];
    let protected = [
        "cancel_task",
        "get_task",
        "initialize",
        "listen",
        "ping",
        "set_level",
        "subscribe",
        "unsubscribe",
        "update_task",
    ];
    assert_eq!(dropped, stopped.into());
    assert_eq!(running, protected.into());
}

/// rmcp does not know that a call at 2026-07-28 with stored events has been cancelled.
#[tokio::test]
async fn a_stopped_call_is_answered_if_a_client_can_receive_the_answer() {
    let handler = Scripted::new(|context| async move {
        report(&context, "a", 1).await;
        std::future::pending().await
    });
    let answer = stored_answer(handler).await;
    assert_eq!(answer["error"]["code"], REQUEST_CANCELLED);
}

#[tokio::test]
async fn a_panic_in_a_destructor_does_not_lose_the_answer() {
    let handler = Scripted::new(|context| async move {
        let _bomb = Bomb;
        report(&context, "a", 1).await;
        std::future::pending().await
    });
    let answer = stored_answer(handler).await;
    assert_eq!(answer["error"]["code"], REQUEST_CANCELLED);
}

/// A method that is not an `async fn` can panic like this.
#[tokio::test]
async fn a_method_that_panics_before_it_returns_its_future_is_answered() {
    let mut wire = Wire::to(AbortOnCancel::new(Hasty));
    wire.request(1, "tools/call", json!({ "name": "any" }));
    let answer = wire.answer().await;
    assert_eq!(answer["error"]["code"], -32_603, "{answer}");
    wire.assert_usable().await;
}

/// Disconnects the client of a call whose events are stored, and returns the stored answer.
async fn stored_answer(handler: Scripted) -> Value {
    let plan = Plan::of(Server::StatelessSse).stored();
    let plan = plan.abort_after(Duration::ZERO);
    let setup = plan.start_scripted(handler).await;
    let mcp = Mcp::sessionless(setup.served.addr, PATH);
    let call = setup.start_primed(&mcp, 1, "any", "a").await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_dropped());
    let polling = async {
        let mcp = setup.mcp().await;
        loop {
            if let Some(answer) = mcp.resume(FIRST_STORED).await.answer().await {
                return answer;
            }
        }
    };
    let answer = within("the answer in the store", polling).await;
    assert_eq!(answer["id"], 1);
    answer
}

/// Panics when it is dropped.
struct Bomb;

/// Panics before it returns a future.
struct Hasty;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the destructor panics on purpose");
    }
}

impl ServerHandler for Hasty {
    fn call_tool(
        &self,
        _: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> impl Future<Output = Result<CallToolResponse, ErrorData>> + Send + '_ {
        if std::hint::black_box(true) {
            panic!("the method panics on purpose");
        }
        std::future::pending()
    }
}
