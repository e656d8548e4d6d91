//! Many concurrent calls and disconnects at random times.

use mcp_cancel_on_disconnect::Outcome;

use serde_json::json;

use crate::{
    setup::{DISCONNECTED, EXCHANGE, EventKind, Server, Setup, arguments, for_servers},
    support::*,
};

/// The number of sessions, which all use the same request ids.
const SESSIONS: usize = 8;

/// The number of calls that each session has in flight at once.
///
/// Both ends of a socket are in this process, which makes 400 descriptors.
const IN_FLIGHT: usize = 25;

const ROUNDS: usize = 5;

/// The number of clients that do not wait for their call to start.
const EARLY_DISCONNECTS: u64 = 300;

/// The largest number of runtime steps before they disconnect.
///
/// By that time, any call has long started.
const STEPS: u64 = 40;

struct Call {
    mcp: Mcp,
    id: usize,
    label: String,
    connection: Connection,
}

for_servers!([wrapped = Wrapped] (flavor = "multi_thread", worker_threads = 2) {
    a_thousand_calls_are_cancelled_only_if_their_clients_disconnect,
    no_call_outlives_its_client_whenever_it_disconnects,
    a_disconnect_after_the_answer_cancels_nothing,
});

for_servers!([layer_only = LayerOnly] (flavor = "multi_thread", worker_threads = 2) {
    a_thousand_calls_are_cancelled_only_if_their_clients_disconnect,
    no_call_outlives_its_client_whenever_it_disconnects,
    a_disconnect_after_the_answer_cancels_nothing,
});

for_servers!([stateless_sse = StatelessSse] (flavor = "multi_thread", worker_threads = 2) {
    no_call_outlives_its_client_whenever_it_disconnects,
    a_disconnect_after_the_answer_cancels_nothing,
});

for_servers!([stateless_json = StatelessJson] (flavor = "multi_thread", worker_threads = 2) {
    no_call_outlives_its_client_whenever_it_disconnects,
    a_disconnect_after_the_answer_cancels_nothing,
});

async fn a_thousand_calls_are_cancelled_only_if_their_clients_disconnect(server: Server) {
    let mut dice = Dice::new();
    let setup = server.start().await;
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(setup.mcp().await);
    }
    let (mut left, mut stayed) = (0, 0);
    for round in 0..ROUNDS {
        let mut connected = start(&setup, &sessions, round, &mut dice).await;
        let disconnecting = connected.split_off(connected.len() / 2);
        left += disconnecting.len();
        stayed += connected.len();

        let disconnected: Vec<_> = disconnecting
            .into_iter()
            .map(|call| call.disconnect(&mut dice))
            .collect();

        for (mcp, id, label) in disconnected {
            assert!(setup.witness.ended(&label).await.is_cancelled(), "{label}");
            let outcome = setup.events.ended(&mcp, id).await;
            assert_eq!(outcome, DISCONNECTED, "{label}");
        }
        assert_eq!(setup.witness.running(), connected.len());
        assert_eq!(setup.calls.len(), connected.len());
        for call in &mut connected {
            setup
                .assert_completes(&call.label, &mut call.connection)
                .await;
            setup.exchanges.over_for(&call.label).await;
        }
        assert!(setup.calls.is_empty());
    }
    assert_eq!(left + stayed, 1_000);
    assert_eq!(setup.witness.cancelled(), left);
    assert_eq!(setup.witness.completed(), stayed);
    // Each call has started once and ended once, and no other event has been reported.
    let (starts, others): (Vec<_>, Vec<_>) = setup
        .events
        .all()
        .into_iter()
        .partition(|kind| *kind == EventKind::Started);
    assert_eq!(starts.len(), 1_000);
    assert_eq!(others.len(), 1_000);
    let cancels = others
        .iter()
        .filter(|kind| **kind == EventKind::Ended(DISCONNECTED));
    assert_eq!(cancels.count(), left);
}

/// The disconnect can happen at any step of the request's processing.
async fn no_call_outlives_its_client_whenever_it_disconnects(server: Server) {
    let mut dice = Dice::new();
    let (setup, mcp) = server.client().await;
    for id in 0..EARLY_DISCONNECTS {
        let marked = mcp.clone().header(EXCHANGE, &format!("call {id}"));
        let call = marked
            .call(id, "hold", arguments(&format!("call {id}")))
            .await;
        // These calls are sure to be running, even on a busy machine.
        if id % 8 == 0 {
            setup.witness.started(&format!("call {id}")).await;
        }
        for _ in 0..dice.roll() % STEPS {
            tokio::task::yield_now().await;
        }
        call.fin();
    }
    setup.assert_usable(&mcp).await;
    setup.witness.running_reaches(0).await;
    setup.exchanges.all_over().await;
    setup.calls_reach(0).await;
    assert!(setup.witness.cancelled() > 0);
    assert_eq!(setup.witness.completed(), 0);
    let failed = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::CancelFailed(_) | EventKind::UnparsedBody(_)
        )
    };
    assert!(!setup.events.all().iter().any(failed));
}

/// The client does not read the end of the stream.
async fn a_disconnect_after_the_answer_cancels_nothing(server: Server) {
    let (setup, mcp) = server.client().await;
    for id in 0..EARLY_DISCONNECTS {
        let label = format!("call {id}");
        let marked = mcp.clone().header(EXCHANGE, &label);
        let mut call = marked.call(id, "echo", json!({ "text": "hi" })).await;
        assert!(call.answer().await.is_some());
        call.fin();
        setup.exchanges.over_for(&label).await;
    }
    setup.calls_reach(0).await;
    let cancels = |kind: &&EventKind| matches!(kind, EventKind::Ended(Outcome::Cancelled(_)));
    let log = setup.events.all();
    assert_eq!(log.iter().filter(cancels).count(), 0);
}

/// Starts a round's calls in random order.
async fn start(setup: &Setup, sessions: &[Mcp], round: usize, dice: &mut Dice) -> Vec<Call> {
    let mut calls = Vec::new();
    for id in round * IN_FLIGHT..(round + 1) * IN_FLIGHT {
        for (session, mcp) in sessions.iter().enumerate() {
            let label = format!("call {id} in session {session}");
            let marked = mcp.clone().header(EXCHANGE, &label);
            calls.push(Call {
                mcp: mcp.clone(),
                id,
                connection: marked.call(id, "hold", arguments(&label)).await,
                label,
            });
        }
    }
    for call in &calls {
        setup.witness.started(&call.label).await;
    }
    setup.calls_reach(calls.len()).await;
    dice.shuffle(&mut calls);
    for call in calls.iter_mut().filter(|_| dice.coin()) {
        call.connection.head().await;
        call.connection.event().await.expect("the priming event");
    }
    calls
}

// === impl Call ===

impl Call {
    /// Disconnects with either a FIN or an RST, at random.
    fn disconnect(self, dice: &mut Dice) -> (Mcp, usize, String) {
        if dice.coin() {
            self.connection.fin()
        } else {
            self.connection.rst()
        }
        (self.mcp, self.id, self.label)
    }
}
