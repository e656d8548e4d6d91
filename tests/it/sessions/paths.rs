//! A session is found on every path that its requests use, and through every service value.

use std::{sync::Arc, time::Duration};

use axum::{Router, routing::post_service};
use http::Method;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Grace, Outcome,
};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;

use crate::{
    setup::{Events, GRACE, Gate, Held, SavedSessions, StoppedClock, TICK, arguments},
    support::*,
};

/// A server whose GETs wait inside the layer until the test lets them through.
struct Bench {
    served: Served,
    layer: CancelOnDisconnectLayer,
    witness: Witness,
    events: Events,
    gate: Gate,
}

impl Bench {
    async fn start(build: impl FnOnce(Router, CancelOnDisconnectLayer) -> Router) -> Self {
        let service = |tools: &Tools| {
            let sessions = CancellableSessionManager::new(LocalSessionManager::default());
            let rmcp = tools.service(Mode::Session, Arc::new(sessions));
            Router::new().fallback_service(rmcp)
        };
        Self::of(service, build).await
    }

    /// Starts two services, each with its own session manager.
    ///
    /// Both restore their sessions from one store.
    async fn two() -> Self {
        let services = |tools: &Tools| {
            let store = Arc::new(SavedSessions::default());
            let service = || {
                let sessions = CancellableSessionManager::new(LocalSessionManager::default());
                let mut config = Mode::Session.config();
                config.session_store = Some(store.clone());
                tools.service_with(config, Arc::new(sessions))
            };
            Router::new()
                .nest_service("/a", service())
                .nest_service("/b", service())
        };
        Self::of(services, |rmcp, layer| rmcp.layer(layer)).await
    }

    async fn of(
        services: impl FnOnce(&Tools) -> Router,
        build: impl FnOnce(Router, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let witness = Witness::new();
        let events = Events::default();
        let layer = CancelOnDisconnectLayer::new()
            .grace(Grace::After(GRACE))
            .observe(events.observer());
        let (gate, slow) = Gate::new(Held::Request, |request| request.method() == Method::GET);
        let rmcp = slow(services(&Tools::new(&witness)));
        Self {
            served: serve(build(rmcp, layer.clone())).await,
            layer,
            witness,
            events,
            gate,
        }
    }

    /// Asserts that two calls are kept by a resume that arrives in time.
    ///
    /// The server does not answer the resume until after the grace period. The first call's resumed stream then gets its
    /// answer, while the second call is cancelled and its stream gets the error.
    async fn check(&mut self, clock: &StoppedClock, path: &str, label: &str) {
        let mcp = Mcp::session(self.served.addr, path).await;
        self.check_of(clock, &mcp, path, label).await;
    }

    async fn check_of(&mut self, clock: &StoppedClock, mcp: &Mcp, path: &str, label: &str) {
        for (id, is_cancelled) in [(1, false), (2, true)] {
            let label = format!("{label}-{id}");
            let mut call = mcp.call(id, "hold", arguments(&label)).await;
            self.witness.started(&label).await;
            call.head().await;
            let primed = call.event().await.expect("the priming event");
            call.fin();
            self.events.detached(mcp, id).await;
            clock.advance(GRACE - TICK).await;
            let mut resumed = self.gate.resume(mcp, &primed.id.expect("an id")).await;

            // The first step stops just past the end of the grace period, because a deadline that is noticed later is
            // postponed.
            for later in [2 * TICK, Duration::from_secs(3)] {
                clock.advance(later).await;
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
            }
            self.gate.open();

            assert_eq!(resumed.head().await.status, 200);
            self.events.resumed(mcp, id, 1).await;
            assert!(self.witness.is_running(&label), "{path}");
            if is_cancelled {
                let call = self.layer.calls().snapshot()[0].info().id();
                assert!(self.layer.calls().cancel(call, CancelReason::Requested));
                let messages = resumed.messages().await;
                let last = messages.last().expect("the error");
                assert_eq!(last["error"]["code"], -32800, "{path}");
                assert!(self.witness.ended(&label).await.is_cancelled());
            } else {
                self.witness.release(&label);
                assert!(resumed.answer().await.is_some(), "{path}");
                assert_eq!(self.events.ended(mcp, id).await, Outcome::Completed);
            }
        }
    }
}

#[tokio::test]
async fn a_session_is_found_on_each_of_many_paths() {
    let clock = StoppedClock::stop();
    let mut bench = Bench::start(|rmcp, layer| {
        Router::new()
            .nest_service("/t/{tenant}/mcp", rmcp)
            .layer(layer)
    })
    .await;
    for tenant in 0..20 {
        let path = format!("/t/{tenant}/mcp");
        // Leaking the path is fine in a test.
        bench.check(&clock, path.leak(), &tenant.to_string()).await;
    }
}

#[tokio::test]
async fn a_session_is_found_through_a_service_value_for_each_method() {
    let clock = StoppedClock::stop();
    let mut bench = Bench::start(|rmcp, layer| {
        let methods = post_service(rmcp.clone()).get_service(rmcp.clone());
        Router::new().route("/mcp", methods.delete_service(rmcp).layer(layer))
    })
    .await;
    bench.check(&clock, "/mcp", "a").await;
}

/// Clients can make up any suffix under a nested service.
///
/// Later sessions are still found just like the first.
#[tokio::test]
async fn a_session_is_found_after_many_paths_that_clients_made_up() {
    let clock = StoppedClock::stop();
    let mut bench =
        Bench::start(|rmcp, layer| Router::new().nest_service("/mcp", rmcp).layer(layer)).await;
    for n in 0..100 {
        let path: &str = format!("/mcp/{n}").leak();
        let mcp = Mcp::session(bench.served.addr, path).await;
        let label = format!("made up {n}");
        let mut call = mcp.call(1, "hold", arguments(&label)).await;
        bench.witness.started(&label).await;
        bench.witness.release(&label);
        assert!(call.answer().await.is_some());
    }
    bench.check(&clock, "/mcp", "a").await;
}

#[tokio::test]
async fn a_session_is_found_at_each_of_two_services_with_one_store_of_sessions() {
    let clock = StoppedClock::stop();
    let mut bench = Bench::two().await;
    for path in ["/a", "/b"] {
        bench.check(&clock, path, path).await;
    }
}

#[tokio::test]
async fn a_session_is_found_also_where_it_was_restored_from_that_of_another_service() {
    let clock = StoppedClock::stop();
    let mut bench = Bench::two().await;
    let opened = Mcp::session(bench.served.addr, "/a").await;
    let restored = Mcp::stateless(bench.served.addr, "/b");
    let restored = restored.in_session(opened.session_id().expect("a session"));
    bench.check_of(&clock, &restored, "/b", "restored").await;
}

/// A session has a call at each of two services, on the first stream of each.
#[tokio::test]
async fn the_cancel_of_a_call_at_one_service_does_not_end_a_stream_of_another() {
    let bench = Bench::two().await;
    let here = Mcp::session(bench.served.addr, "/a").await;
    let there = Mcp::stateless(bench.served.addr, "/b");
    let there = there.in_session(here.session_id().expect("a session"));
    let mut calls = Vec::new();
    for (mcp, id, label) in [(&here, 1, "here"), (&there, 2, "there")] {
        let mut call = mcp.call(id, "hold", arguments(label)).await;
        bench.witness.started(label).await;
        call.head().await;
        let primed = call.event().await.expect("the priming event");
        calls.push((call, primed.id.expect("an id")));
    }
    let (lost, event) = calls.pop().expect("two");
    assert_eq!(event, calls[0].1, "both calls have the same event id");
    lost.fin();
    bench.events.detached(&there, 2).await;
    bench.gate.open();
    let mut resumed = there.resume(&event).await;
    assert_eq!(resumed.head().await.status, 200);
    bench.events.resumed(&there, 2, 1).await;

    let other = bench.layer.calls().snapshot()[0].info().id();
    assert!(bench.layer.calls().cancel(other, CancelReason::Requested));
    assert!(bench.witness.ended("here").await.is_cancelled());
    bench.witness.release("there");
    resumed.assert_done("there").await;
}
