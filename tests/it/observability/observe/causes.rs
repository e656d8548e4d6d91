//! The causes that are reported when calls lose their clients.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
};
use mcp_cancel_on_disconnect::{Event, Grace, Outcome, observe::DetachCause};
use serde_json::json;

use crate::{
    setup::{
        DISCONNECTED, EXCHANGE, EventKind, GRACE, ORPHANED, Plan, Server, Setup, StoppedClock,
        TICK, for_servers, stalled,
    },
    support::*,
};

/// The reported causes of detachments and of ends.
#[derive(Clone, Debug, Default)]
struct Causes(Arc<Mutex<Vec<Cause>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Detached(DetachCause, Option<Duration>),
    Resumed(Option<(DetachCause, Duration)>),
    Ended(Outcome, Option<(DetachCause, Duration)>),
}

use Cause::{Detached, Ended, Resumed};

for_servers!(sessions {
    an_end_has_the_length_and_the_cause_of_its_detachment,
    a_resume_has_the_length_of_its_detachment,
    a_client_that_resumes_before_its_disconnect_is_detected_was_never_detached,
    a_stream_that_the_server_ends_is_distinguished_from_a_disconnect,
    a_client_that_does_not_read_is_distinguished_from_a_disconnect,
    a_client_that_does_not_read_its_resumed_stream_is_distinguished_from_a_disconnect,
    an_inner_service_that_drops_its_stream_is_distinguished_from_a_disconnect,
});

for_servers!([
    wrapped_stateless = Wrapped,
    layer_only_stateless = LayerOnly,
    stateless_sse = StatelessSse,
    stateless_json = StatelessJson,
] {
    a_call_that_is_cancelled_at_once_was_detached_for_no_time,
});

async fn an_end_has_the_length_and_the_cause_of_its_detachment(server: Server) {
    let clock = StoppedClock::stop();
    let (setup, causes) = watched(Plan::with_grace(server)).await;
    let mcp = setup.mcp().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + TICK).await;
    setup.events.ended(&mcp, 1).await;

    let away = Some((DetachCause::Disconnected, GRACE + TICK));
    let expected = [
        Detached(DetachCause::Disconnected, Some(GRACE)),
        Ended(ORPHANED, away),
    ];
    assert_eq!(causes.all(), expected);
}

async fn a_resume_has_the_length_of_its_detachment(server: Server) {
    let clock = StoppedClock::stop();
    let (setup, causes) = watched(Plan::with_grace(server)).await;
    let mcp = setup.mcp().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(TICK * 7).await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;
    setup.assert_completes("a", &mut resumed).await;
    setup.events.ended(&mcp, 1).await;

    let expected = [
        Detached(DetachCause::Disconnected, Some(GRACE)),
        Resumed(Some((DetachCause::Disconnected, TICK * 7))),
        Ended(Outcome::Completed, None),
    ];
    assert_eq!(causes.all(), expected);
}

/// The old connection is dead.
///
/// Its stream is not being read, so the server has not noticed yet.
async fn a_client_that_resumes_before_its_disconnect_is_detected_was_never_detached(
    server: Server,
) {
    let plan = Plan::with_grace(server).inside(stalled);
    let (setup, causes) = watched(plan).await;
    let mcp = setup.mcp().await;
    let _l = setup.start_primed(&mcp, 1, "hold", "a").await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;
    setup.assert_completes("a", &mut resumed).await;
    setup.events.ended(&mcp, 1).await;

    assert_eq!(
        causes.all(),
        [Resumed(None), Ended(Outcome::Completed, None)]
    );
}

async fn a_stream_that_the_server_ends_is_distinguished_from_a_disconnect(server: Server) {
    let (setup, causes) = watched(Plan::with_grace(server)).await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    setup.sessions.end_stream(&mcp, 0, None).await;
    while call.event().await.is_some() {}
    setup.events.detached(&mcp, 1).await;

    let expected = [Detached(DetachCause::EndedByServer, Some(GRACE))];
    assert_eq!(causes.all(), expected);
}

async fn a_call_that_is_cancelled_at_once_was_detached_for_no_time(server: Server) {
    let _clock = StoppedClock::stop();
    let (setup, causes) = watched(Plan::of(server)).await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    setup.events.ended(&mcp, 1).await;

    let away = Some((DetachCause::Disconnected, Duration::ZERO));
    let expected = [
        Detached(DetachCause::Disconnected, Some(Duration::ZERO)),
        Ended(DISCONNECTED, away),
    ];
    assert_eq!(causes.all(), expected);
}

async fn a_client_that_does_not_read_is_distinguished_from_a_disconnect(server: Server) {
    let clock = StoppedClock::stop();
    let (setup, causes) = watched(with_stall_timeout(server)).await;
    let mcp = setup.mcp().await;
    let mut unread = Connection::open_with_receive_buffer(setup.served.addr, 4_096).await;
    unread.send(&flood(&mcp)).await;
    setup.witness.started("a").await;
    stall(&setup, &mcp, &clock, 1).await;

    let expected = [Detached(DetachCause::Stalled, Some(GRACE))];
    assert_eq!(causes.all(), expected);
    drop(unread);
}

async fn a_client_that_does_not_read_its_resumed_stream_is_distinguished_from_a_disconnect(
    server: Server,
) {
    let clock = StoppedClock::stop();
    let (setup, causes) = watched(with_stall_timeout(server)).await;
    let mcp = setup.mcp().await;
    let mut call = mcp.send(&flood(&mcp)).await;
    setup.witness.started("a").await;
    call.head().await;
    call.event().await.expect("the priming event");
    let mut unread = Connection::open_with_receive_buffer(setup.served.addr, 4_096).await;
    unread.send(&mcp.resume_request("0/0")).await;
    setup.events.resumed(&mcp, 1, 1).await;
    // rmcp has ended the first stream because of the resume.
    stall(&setup, &mcp, &clock, 2).await;

    let expected = Detached(DetachCause::Stalled, Some(GRACE));
    assert_eq!(causes.all().last(), Some(&expected), "{causes:?}");
    drop(unread);
}

async fn an_inner_service_that_drops_its_stream_is_distinguished_from_a_disconnect(server: Server) {
    let drops_first_stream = |router: axum::Router| {
        router.layer(from_fn(async |request: Request, next: Next| {
            let is_call = request.headers().contains_key(EXCHANGE);
            let response = next.run(request).await;
            if is_call {
                // The stream is dropped, and the client does not get an error.
                response.map(|_| Body::from_stream(broken()))
            } else {
                response
            }
        }))
    };
    let (setup, causes) = watched(Plan::of(server).inside(drops_first_stream)).await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.ended(&mcp, 1).await;

    let all = causes.all();
    let expected = Detached(DetachCause::ResponseDropped, Some(Duration::ZERO));
    assert_eq!(all.first(), Some(&expected), "{all:?}");
    drop(call);
}

/// With the layer alone, a call's end cannot be observed unless its client resumes.
#[tokio::test]
async fn a_call_that_is_untracked_and_keeps_running_ends_as_unknown() {
    const HOUR: Duration = Duration::from_secs(60 * 60);
    let clock = StoppedClock::stop();
    let (setup, causes) = watched(Plan::of(Server::LayerOnly).grace(Grace::Never)).await;
    let mcp = setup.mcp().await;
    setup.cut(&mcp, 1, "a").await;
    // If the clock advanced in steps, rmcp would close the session before the hour is over.
    clock.jump(HOUR + TICK).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Unknown);

    let away = Some((DetachCause::Disconnected, HOUR + TICK));
    let expected = [
        Detached(DetachCause::Disconnected, None),
        Ended(Outcome::Unknown, away),
    ];
    assert_eq!(causes.all(), expected);
    assert!(setup.calls.is_empty());
    assert!(setup.witness.is_running("a"));
}

fn broken() -> impl futures_util::Stream<Item = Result<bytes::Bytes, std::io::Error>> {
    futures_util::stream::once(async { Err(std::io::Error::other("broken on purpose")) })
}

const STALL: Duration = Duration::from_secs(5);

/// Plans a server that treats a client that does not read as disconnected.
///
/// Its sockets have small buffers.
fn with_stall_timeout(server: Server) -> Plan {
    let plan = Plan::with_grace(server);
    plan.layer(|layer| layer.stall_timeout(STALL))
        .send_buffer(4_096)
}

/// Returns a request for call 1, which sends more than the sockets and hyper can buffer.
fn flood(mcp: &Mcp) -> crate::support::Request {
    mcp.call_request(1, "chatty", json!({ "label": "a", "events": 100_000 }))
}

/// Advances the clock until call 1 has been detached this many times.
async fn stall(setup: &Setup, mcp: &Mcp, clock: &StoppedClock, times: usize) {
    let detached = async {
        let is_detached = |kind: &&EventKind| matches!(kind, EventKind::Detached(_));
        while setup.events.of(mcp, 1).iter().filter(is_detached).count() < times {
            // Sockets fill up in real time.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            clock.advance_past(STALL / 10).await;
        }
    };
    within("the call to be detached", detached).await;
}

async fn watched(plan: Plan) -> (Setup, Causes) {
    let causes = Causes::default();
    let record = causes.clone();
    let plan = plan.layer(|layer| layer.observe(move |event: &Event<'_>| record.record(event)));
    (plan.start().await, causes)
}

// === impl Causes ===

impl Causes {
    fn record(&self, event: &Event<'_>) {
        let cause = match event {
            Event::Detached { cause, grace, .. } => Detached(*cause, *grace),
            Event::Resumed { detachment, .. } => {
                Resumed(detachment.map(|detachment| (detachment.cause(), detachment.lasted())))
            }
            Event::Ended {
                outcome,
                detachment,
                ..
            } => Ended(
                *outcome,
                detachment.map(|detachment| (detachment.cause(), detachment.lasted())),
            ),
            _ => return,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(cause);
    }

    fn all(&self) -> Vec<Cause> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
