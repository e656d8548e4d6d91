//! Sessions whose client has disconnected are closed after the lost timeout. No others are.

use std::{sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::{
    CancellableSessionManager, Grace, Limits,
    observe::{SessionEnd, SessionEvent},
};
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
    local::{LocalSessionManager, SessionConfig},
};
use serde_json::json;

use super::idle::{FIRST_EVENT, IDLE, TICK, detach, is_open, settle, until_closed};
use crate::{
    setup::{Plan, Scripted, Server, Sessions, Setup, StoppedClock, Store},
    support::*,
};

const LOST_TIMEOUT: Duration = Duration::from_secs(30);

/// Less than [`LOST_TIMEOUT`], but more than the server needs to notice a disconnect.
const SOME_TIME: Duration = Duration::from_secs(20);

fn plan() -> Plan {
    let wrap = |mut local: LocalSessionManager| {
        local.session_config.keep_alive = None;
        CancellableSessionManager::new(local)
            .idle_timeout(IDLE)
            .lost_timeout(LOST_TIMEOUT)
    };
    Plan::of(Server::Wrapped).wrap(wrap)
}

/// Returns a plan in which no calls are tracked.
fn untracked() -> Plan {
    plan().layer(|layer| layer.limits(Limits::default().calls(0)))
}

/// Advances the clock in steps, so that the server notices disconnects.
async fn pass(setup: &Setup, clock: &StoppedClock, time: Duration) {
    let step = Duration::from_millis(500);
    let mut passed = Duration::ZERO;
    while passed < time {
        clock.advance_past(step).await;
        settle(setup).await;
        passed += step;
    }
}

/// Opens a standalone stream.
async fn listen(mcp: &Mcp) -> Connection {
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    standalone
}

/// Resumes one of a session's streams.
///
/// Asserts that the session stays open for as long as the stream, and is closed after it.
async fn assert_lost_with_resumed_stream(
    setup: &Setup,
    clock: &StoppedClock,
    mcp: &Mcp,
    last_event_id: &str,
) {
    let mut resumed = mcp.resume(last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    pass(setup, clock, 2 * LOST_TIMEOUT).await;
    assert!(is_open(setup, mcp).await);

    resumed.fin();
    pass(setup, clock, LOST_TIMEOUT + SOME_TIME).await;

    until_closed(setup, mcp).await;
}

/// Disconnects the client from a standalone stream.
///
/// Asserts that its session is closed on time.
async fn assert_closed_after_its_standalone_stream(setup: &Setup, clock: &StoppedClock, mcp: &Mcp) {
    let standalone = listen(mcp).await;
    pass(setup, clock, 2 * LOST_TIMEOUT).await;
    assert!(is_open(setup, mcp).await);

    standalone.fin();
    pass(setup, clock, SOME_TIME).await;
    assert!(is_open(setup, mcp).await);
    pass(setup, clock, SOME_TIME).await;

    until_closed(setup, mcp).await;
}

#[tokio::test]
async fn a_session_whose_client_disconnected_from_its_standalone_stream_is_closed_early() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let (mcp, quiet) = (setup.mcp().await, setup.mcp().await);
    assert_closed_after_its_standalone_stream(&setup, &clock, &mcp).await;
    assert!(
        is_open(&setup, &quiet).await,
        "this client has had no stream"
    );
    clock.advance(IDLE).await;
    until_closed(&setup, &quiet).await;
}

#[tokio::test]
async fn a_session_whose_client_disconnected_from_its_call_is_closed_after_the_grace_of_the_call() {
    let clock = StoppedClock::stop();
    for grace in [Grace::Immediate, Grace::After(3 * LOST_TIMEOUT)] {
        let (setup, mcp) = plan().grace(grace).client().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        call.head().await;
        call.fin();
        if let Grace::After(grace) = grace {
            setup.events.detached(&mcp, 1).await;
            pass(&setup, &clock, grace - SOME_TIME).await;
            assert!(setup.witness.is_running("a"));
            pass(&setup, &clock, SOME_TIME).await;
        }
        setup.events.ended(&mcp, 1).await;
        assert!(is_open(&setup, &mcp).await);

        pass(&setup, &clock, LOST_TIMEOUT + SOME_TIME).await;

        until_closed(&setup, &mcp).await;
    }
}

#[tokio::test]
async fn a_request_shows_that_the_client_is_not_lost() {
    let (clock, setup, mcp) = plan().stopped().await;
    let standalone = listen(&mcp).await;
    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;

    setup.assert_usable(&mcp).await;

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;
    assert!(
        is_open(&setup, &mcp).await,
        "its streams have ended with their answers"
    );
}

/// The client resumes before the server notices that the old connection is closed.
#[tokio::test]
async fn a_client_that_resumed_a_call_is_not_lost() {
    let (clock, setup, mcp) = plan().grace(Grace::After(IDLE)).stopped().await;
    detach(&setup, &mcp).await;
    let mut resumed = mcp.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    let mut again = mcp.resume(FIRST_EVENT).await;
    assert_eq!(again.head().await.status, 200);
    resumed.fin();
    settle(&setup).await;
    setup.assert_completes("a", &mut again).await;

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;

    assert!(is_open(&setup, &mcp).await);
    clock.advance(IDLE + TICK).await;
    until_closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_client_that_resumed_its_standalone_stream_is_lost_with_that_stream() {
    let (clock, setup, mcp) = plan().stopped().await;
    let mut standalone = listen(&mcp).await;
    let event = standalone.event().await.expect("the priming event");
    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;
    assert_lost_with_resumed_stream(&setup, &clock, &mcp, &event.id.expect("an event id")).await;
}

/// When a client cancels a call, the call's stream ends but the client is still there.
#[tokio::test]
async fn a_client_that_cancels_its_call_is_not_lost() {
    let (clock, setup, mcp) = plan().stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    assert_eq!(mcp.cancel(1).await, 202);
    setup.events.ended(&mcp, 1).await;

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;

    assert!(is_open(&setup, &mcp).await);
}

/// When a server ends a stream, it asks the client to wait before reconnecting (SEP-1699).
#[tokio::test]
async fn a_client_whose_standalone_stream_the_server_ended_is_not_lost() {
    let (clock, setup, mcp) = plan().stopped().await;
    let mut standalone = listen(&mcp).await;
    setup
        .sessions
        .end_standalone_stream(&mcp, Some(3 * LOST_TIMEOUT))
        .await;
    standalone.body_to_end().await;

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;

    assert!(is_open(&setup, &mcp).await);
}

#[tokio::test]
async fn without_an_idle_timeout_only_lost_sessions_are_closed() {
    let clock = StoppedClock::stop();
    let wrap = |_| {
        let sessions = CancellableSessionManager::local(SessionConfig::default());
        sessions.no_idle_timeout().lost_timeout(LOST_TIMEOUT)
    };
    let setup = Plan::of(Server::Wrapped).wrap(wrap).start().await;
    let (mcp, quiet) = (setup.mcp().await, setup.mcp().await);
    let standalone = listen(&mcp).await;
    standalone.fin();

    pass(&setup, &clock, LOST_TIMEOUT + SOME_TIME).await;
    until_closed(&setup, &mcp).await;
    clock.advance(4 * IDLE).await;
    assert!(is_open(&setup, &quiet).await);
}

/// The client has only lost its standalone stream and is reading its call's.
#[tokio::test]
async fn a_client_that_reads_the_stream_of_an_untracked_call_is_not_lost() {
    let (clock, setup, mcp) = untracked().stopped().await;
    let standalone = listen(&mcp).await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    standalone.fin();
    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;
    assert!(is_open(&setup, &mcp).await);
    setup.assert_completes("a", &mut call).await;

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;

    assert!(is_open(&setup, &mcp).await);
}

#[tokio::test]
async fn without_a_layer_a_client_that_reads_the_stream_of_a_call_is_not_lost() {
    let clock = StoppedClock::stop();
    let manager =
        CancellableSessionManager::local(SessionConfig::default()).lost_timeout(LOST_TIMEOUT);
    let witness = Witness::new();
    let sessions = Sessions::Wrapped(Arc::new(manager));
    let router = sessions.router(Tools::new(&witness), Mode::Session.config());
    let served = serve(router).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let other = Mcp::session(served.addr, PATH).await;
    let standalone = listen(&mcp).await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    witness.started("a").await;
    let initialized = "notifications/initialized";
    standalone.fin();
    assert_eq!(other.notify(initialized, json!({})).await, 202);
    clock.advance(LOST_TIMEOUT).await;
    witness.release("a");
    assert!(call.answer().await.is_some());

    for _ in 0..4 {
        clock.advance(LOST_TIMEOUT / 2).await;
        assert_eq!(other.notify(initialized, json!({})).await, 202);
    }

    assert_eq!(mcp.notify(initialized, json!({})).await, 202);
}

/// Such a call's end is not observed, and closing the session would end its handler.
#[tokio::test]
async fn a_client_that_disconnected_from_an_untracked_call_is_not_lost() {
    let (clock, setup, mcp) = untracked().stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let standalone = listen(&mcp).await;
    call.fin();
    settle(&setup).await;
    standalone.fin();

    pass(&setup, &clock, 2 * LOST_TIMEOUT).await;

    assert!(is_open(&setup, &mcp).await);
    assert!(setup.witness.is_running("a"));
}

#[tokio::test]
async fn an_untracked_call_that_was_answered_does_not_keep_a_lost_session() {
    let (clock, setup, mcp) = untracked().stopped().await;
    let standalone = listen(&mcp).await;
    setup.assert_usable(&mcp).await;
    standalone.fin();

    pass(&setup, &clock, LOST_TIMEOUT + SOME_TIME).await;

    until_closed(&setup, &mcp).await;
}

/// A store whose replays continue with later events.
struct Following(Store);

#[async_trait::async_trait]
impl EventStore for Following {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        self.0.store_event(stream, event).await
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let replayed = self.0.replay_events_after(last).await?;
        let later = futures_util::stream::pending();
        Ok(Box::pin(futures_util::StreamExt::chain(replayed, later)))
    }
}

#[tokio::test]
async fn with_an_event_store_a_client_that_resumed_its_standalone_stream_is_lost_with_that_stream()
{
    let clock = StoppedClock::stop();
    let stored =
        |local: LocalSessionManager| local.with_event_store(Arc::new(Following(Store::default())));
    let notifies = Scripted::new(|context| async move {
        let notified = context.peer.notify_tool_list_changed().await;
        notified.expect("the session is open");
        Ok("notified".to_owned())
    });
    let setup = plan().sessions(stored).start_scripted(notifies).await;
    let mcp = setup.mcp().await;
    let mut standalone = listen(&mcp).await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    assert!(call.answer().await.is_some());
    let mut last = None;
    while last.is_none() {
        last = standalone.event().await.expect("the notification").id;
    }
    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;
    assert_lost_with_resumed_stream(&setup, &clock, &mcp, &last.expect("an event id")).await;
}

/// Even a standalone stream that does not count as use shows that its client is connected.
#[tokio::test]
async fn a_client_that_disconnected_from_an_ignored_standalone_stream_is_lost() {
    let wrap = |_| {
        let sessions = CancellableSessionManager::local(SessionConfig::default());
        sessions
            .lost_timeout(LOST_TIMEOUT)
            .ignore_standalone_streams()
    };
    let (clock, setup, mcp) = Plan::of(Server::Wrapped).wrap(wrap).stopped().await;
    assert_closed_after_its_standalone_stream(&setup, &clock, &mcp).await;
}

#[tokio::test]
async fn observers_are_notified_why_a_session_was_closed() {
    let clock = StoppedClock::stop();
    let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let wrap = move |_| {
        let sessions = CancellableSessionManager::local(SessionConfig::default());
        sessions
            .lost_timeout(LOST_TIMEOUT)
            .on_session(move |event| {
                if let SessionEvent::Closed {
                    session, reason, ..
                } = event
                {
                    let _ = sender.send(((*session).to_owned(), *reason));
                }
            })
    };
    let setup = Plan::of(Server::Wrapped).wrap(wrap).start().await;
    let (deleted, lost, idle) = (setup.mcp().await, setup.mcp().await, setup.mcp().await);
    let standalone = listen(&lost).await;
    let mut found = async |mcp: &Mcp| loop {
        let end = within("the session to end", ends.recv()).await;
        let (session, reason) = end.expect("the observer exists");
        if Some(&*session) == mcp.session_id() {
            return reason;
        }
    };

    assert_eq!(deleted.delete().await, 202);
    assert_eq!(found(&deleted).await, SessionEnd::Ended);
    standalone.fin();
    pass(&setup, &clock, LOST_TIMEOUT + SOME_TIME).await;
    assert_eq!(found(&lost).await, SessionEnd::Lost);
    clock.advance(IDLE).await;
    assert_eq!(found(&idle).await, SessionEnd::Idle);
}
