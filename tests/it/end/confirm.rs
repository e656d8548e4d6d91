//! A callback has to confirm that an orphan is cancelled.
//!
//! The clock is stopped and only moves when a test advances it.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{CancelReason, Confirmation, Grace, Outcome};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::{
    setup::{
        DISCONNECTED, EventKind, FIRST_EVENT, GRACE, ORPHANED, Plan, Server, Setup, StoppedClock,
        TICK, for_servers,
    },
    support::*,
};

/// How long the callback may take to decide.
const LIMIT: Duration = Duration::from_secs(10);

/// How long after a confirmed cancel the layer checks whether its runtime has stalled.
const RECHECK_DELAY: Duration = Duration::from_millis(100);

for_servers!(sessions {
    confirm_is_not_called_before_the_grace_ends,
    a_confirmed_orphan_is_cancelled,
    a_postponed_call_waits_and_is_confirmed_again,
    a_call_that_is_postponed_forever_is_not_confirmed_again,
    a_call_of_another_servers_session_ends_as_its_session_closed,
    a_client_that_resumes_during_the_confirmation_keeps_its_call,
    a_decision_about_an_earlier_grace_has_no_effect,
    no_decision_in_time_postpones_the_call,
    a_panic_postpones_the_call,
    a_panic_during_the_confirmation_postpones_the_call,
    other_cancels_need_no_confirmation,
    a_call_without_a_grace_needs_no_confirmation_when_its_pending_resume_is_refused,
});

// The layer alone cannot observe the answer to a call whose client is disconnected.
for_servers!([wrapped_session = Wrapped] {
    an_answer_to_the_call_ends_the_confirmation,
});

/// Receives the pending confirmations, which the test can answer at any time.
struct Confirmations(mpsc::UnboundedReceiver<PendingConfirmation>);

struct PendingConfirmation {
    lasted: Duration,
    grace: Duration,
    answer: oneshot::Sender<Confirmation>,
}

impl Confirmations {
    async fn next(&mut self) -> PendingConfirmation {
        let pending = self.0.recv().await;
        pending.expect("the layer is alive")
    }

    fn is_empty(&mut self) -> bool {
        self.0.try_recv().is_err()
    }
}

impl PendingConfirmation {
    fn answer(self, answer: Confirmation) {
        self.answer.send(answer).expect("the layer is listening");
    }
}

async fn confirm_is_not_called_before_the_grace_ends(server: Server) {
    let (clock, setup, mcp, mut confirmations) = detached(server, GRACE).await;
    clock.advance(GRACE - TICK).await;
    setup.assert_usable(&mcp).await;
    assert!(confirmations.is_empty());

    clock.advance(2 * TICK).await;

    let pending = confirmations.next().await;
    assert_eq!(pending.grace, GRACE);
    assert!((GRACE..GRACE + RECHECK_DELAY).contains(&pending.lasted));
    assert!(setup.witness.is_running("a"));
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn a_confirmed_orphan_is_cancelled(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;

    confirmations.next().await.answer(Confirmation::Cancel);
    assert_cancelled(&clock, &setup, &mcp).await;
    assert!(setup.witness.ended("a").await.is_cancelled());
    let events = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        EventKind::Ended(ORPHANED),
    ];
    assert_eq!(setup.events.of(&mcp, 1), events);
    assert!(
        confirmations.is_empty(),
        "only one confirmation is requested"
    );
}

async fn a_postponed_call_waits_and_is_confirmed_again(server: Server) {
    const WAIT: Duration = Duration::from_secs(3);
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    for _ in 0..3 {
        let pending = confirmations.next().await;
        pending.answer(Confirmation::Postpone(WAIT));
        setup.assert_usable(&mcp).await;
        clock.advance(WAIT - TICK).await;
        setup.assert_usable(&mcp).await;
        assert!(confirmations.is_empty());
        assert!(!setup.tokens.of("a").is_cancelled());
        clock.advance(2 * TICK).await;
    }
    let pending = confirmations.next().await;
    assert!(pending.lasted >= GRACE + 3 * WAIT, "{:?}", pending.lasted);
    assert_eq!(pending.grace, GRACE);
    pending.answer(Confirmation::Cancel);
    assert_cancelled(&clock, &setup, &mcp).await;
}

async fn a_call_that_is_postponed_forever_is_not_confirmed_again(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    confirmations
        .next()
        .await
        .answer(Confirmation::Postpone(Duration::MAX));
    setup.assert_usable(&mcp).await;
    for _ in 0..5 {
        clock.advance(10 * GRACE).await;
        setup.assert_usable(&mcp).await;
    }
    assert!(confirmations.is_empty(), "postponed forever");
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn a_call_of_another_servers_session_ends_as_its_session_closed(server: Server) {
    let (_clock, setup, mcp, mut confirmations) = orphaned(server).await;

    confirmations
        .next()
        .await
        .answer(Confirmation::SessionClosed);

    let closed = Outcome::Cancelled(CancelReason::SessionClosed);
    assert_eq!(setup.events.ended(&mcp, 1).await, closed);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_client_that_resumes_during_the_confirmation_keeps_its_call(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    let pending = confirmations.next().await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;

    pending.answer(Confirmation::Cancel);

    setup.assert_usable(&mcp).await;
    clock.advance(3 * GRACE).await;
    setup.assert_completes("a", &mut resumed).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(confirmations.is_empty());
}

async fn a_decision_about_an_earlier_grace_has_no_effect(server: Server) {
    let short = Duration::from_secs(2);
    let (clock, setup, mcp, mut confirmations) = detached(server, short).await;
    clock.advance(short + TICK).await;
    let first = confirmations.next().await;
    let resumed = setup.resume(&mcp, 1, 1).await;
    resumed.fin();
    setup.events.detached_again(&mcp, 1, 2).await;
    clock.advance(short + TICK).await;
    let second = confirmations.next().await;

    first.answer(Confirmation::Cancel);

    setup.assert_usable(&mcp).await;
    clock.advance(2 * RECHECK_DELAY).await;
    setup.assert_usable(&mcp).await;
    assert!(!setup.tokens.of("a").is_cancelled());
    assert!(setup.witness.is_running("a"));
    second.answer(Confirmation::Cancel);
    assert_cancelled(&clock, &setup, &mcp).await;
}

async fn no_decision_in_time_postpones_the_call(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    let unanswered = confirmations.next().await;
    setup.assert_usable(&mcp).await;
    clock.advance(LIMIT + TICK).await;
    setup.assert_usable(&mcp).await;
    assert!(
        unanswered.answer.is_closed(),
        "the layer has stopped waiting"
    );
    assert!(setup.witness.is_running("a"));

    clock.advance(GRACE + TICK).await;

    confirmations.next().await.answer(Confirmation::Cancel);
    assert_cancelled(&clock, &setup, &mcp).await;
}

async fn a_panic_postpones_the_call(server: Server) {
    let clock = StoppedClock::stop();
    let (sender, mut confirmations) = mpsc::unbounded_channel();
    let plan = Plan::with_grace(server);
    let plan = plan.layer(move |layer| {
        layer.confirm(move |_| {
            sender.send(()).unwrap();
            assert!(sender.is_closed(), "on purpose");
            async { Confirmation::Cancel }
        })
    });
    let (setup, mcp) = plan.client().await;
    setup.cut(&mcp, 1, "a").await;
    for _ in 0..2 {
        clock.advance(GRACE + TICK).await;
        confirmations.recv().await.unwrap();
        setup.assert_usable(&mcp).await;
        assert!(!setup.tokens.of("a").is_cancelled());
    }
}

async fn a_panic_during_the_confirmation_postpones_the_call(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    // Dropping the sender makes the callback's future panic.
    drop(confirmations.next().await.answer);
    setup.assert_usable(&mcp).await;
    clock.advance(GRACE + TICK).await;
    drop(confirmations.next().await);
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn an_answer_to_the_call_ends_the_confirmation(server: Server) {
    let (clock, setup, mcp, mut confirmations) = orphaned(server).await;
    let pending = confirmations.next().await;
    setup.witness.release("a");
    let _end = setup.witness.ended("a").await;
    setup.calls_reach(0).await;
    let before = setup.events.of(&mcp, 1);

    pending.answer(Confirmation::Cancel);

    setup.assert_usable(&mcp).await;
    clock.advance(GRACE).await;
    assert_eq!(setup.events.of(&mcp, 1), before);
}

async fn other_cancels_need_no_confirmation(server: Server) {
    let (_clock, setup, mcp, mut confirmations) = orphaned(server).await;
    let pending = confirmations.next().await;
    let [call] = &*setup.calls.snapshot() else {
        panic!("one call");
    };
    assert!(setup.calls.cancel(call.id(), CancelReason::Requested));
    let requested = Outcome::Cancelled(CancelReason::Requested);
    assert_eq!(setup.events.ended(&mcp, 1).await, requested);
    pending.answer(Confirmation::Postpone(GRACE));
    setup.assert_usable(&mcp).await;
    assert!(setup.calls.is_empty());
    assert!(confirmations.is_empty());
}

async fn a_call_without_a_grace_needs_no_confirmation_when_its_pending_resume_is_refused(
    server: Server,
) {
    let (waiting, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (waits, opens) = (waiting.clone(), gate.clone());
    let plan = Plan::of(server)
        .grace(Grace::Immediate)
        .inside(move |router| {
            router.layer(from_fn(move |request: Request, next: Next| {
                let (waits, opens) = (waits.clone(), opens.clone());
                async move {
                    if !request.headers().contains_key("last-event-id") {
                        return next.run(request).await;
                    }
                    waits.add_permits(1);
                    let _open = opens.acquire().await;
                    StatusCode::UNAUTHORIZED.into_response()
                }
            }))
        });
    let (setup, mut confirmations) = start_with_confirm(plan).await;
    let mcp = setup.mcp().await;
    let call = setup.start_primed(&mcp, 1, "hold", "a").await;
    let mut refused = mcp.resume(FIRST_EVENT).await;
    let _waits = waiting.acquire().await;
    call.fin();
    setup.exchanges.over_for("a").await;

    gate.add_permits(1);

    assert_eq!(refused.head().await.status, 401);
    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
    assert!(confirmations.is_empty());
}

/// Starts call 1 and disconnects its client.
async fn detached(server: Server, grace: Duration) -> (StoppedClock, Setup, Mcp, Confirmations) {
    let clock = StoppedClock::stop();
    let (setup, confirmations) =
        start_with_confirm(Plan::of(server).grace(Grace::After(grace))).await;
    let mcp = setup.mcp().await;
    setup.cut(&mcp, 1, "a").await;
    (clock, setup, mcp, confirmations)
}

/// Like [`detached`], but its grace period has already ended.
async fn orphaned(server: Server) -> (StoppedClock, Setup, Mcp, Confirmations) {
    let started = detached(server, GRACE).await;
    started.0.advance(GRACE + TICK).await;
    started
}

/// Asserts that the confirmed cancel takes effect.
async fn assert_cancelled(clock: &StoppedClock, setup: &Setup, mcp: &Mcp) {
    setup.assert_usable(mcp).await;
    clock.advance(RECHECK_DELAY + TICK).await;
    assert_eq!(setup.events.ended(mcp, 1).await, ORPHANED);
}

async fn start_with_confirm(plan: Plan) -> (Setup, Confirmations) {
    let (sender, confirmations) = mpsc::unbounded_channel();
    let plan = plan.layer(move |layer| {
        layer.confirm(move |orphan| {
            let (answer, answered) = oneshot::channel();
            let pending = PendingConfirmation {
                lasted: orphan.detachment().lasted(),
                grace: orphan.grace(),
                answer,
            };
            // The test might have dropped its receiver.
            let _ = sender.send(pending);
            async move { answered.await.expect("on purpose: no answer") }
        })
    });
    (plan.start().await, Confirmations(confirmations))
}
