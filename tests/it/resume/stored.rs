//! A client resumes a call that has ended and whose events are in a store.
//!
//! The store has everything that the client has missed. If it does not have the answer, the layer's retained answer is
//! used.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use rmcp::{
    model::JsonRpcMessage,
    transport::streamable_http_server::session::{
        EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
    },
};
use serde_json::json;

use crate::{
    setup::{GRACE, Plan, Server, Setup, StoppedClock, Store, TICK},
    support::*,
};

/// How long a store may take to send the next event of a completed call.
const SILENCE: Duration = Duration::from_secs(1);

const PROGRESS: &str = "notifications/progress";

/// A store that loses some of its events.
struct Lossy {
    store: Store,
    loses: Loses,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Loses {
    Nothing,
    Answers,
    /// Loses answers, and the replay waits for more events.
    AnswersAndTheEnd,
    /// Loses all events except those that open streams.
    Messages,
    /// Fails every replay.
    Everything,
}

#[tokio::test]
async fn a_resume_of_an_answered_call_gets_all_missed_events() {
    let (setup, mcp, ids) = complete_detached(Loses::Nothing).await;

    let delivered = delivered(&mcp, &ids[0]).await;

    assert_eq!(delivered, [PROGRESS, PROGRESS, PROGRESS, "done:a"]);
    drop(setup);
}

#[tokio::test]
async fn a_resume_from_the_middle_of_an_answered_call_gets_the_later_events() {
    let (setup, mcp, ids) = complete_detached(Loses::Nothing).await;

    assert_eq!(delivered(&mcp, &ids[2]).await, [PROGRESS, "done:a"]);
    let mut resumed = mcp.resume(&ids[3]).await;
    resumed.head().await;
    let answer = resumed.event().await.expect("the answer");
    let id = answer.id.expect("an id");
    assert_eq!(
        delivered(&mcp, &id).await,
        [""; 0],
        "the client already has the answer"
    );
    drop(setup);
}

#[tokio::test]
async fn an_answer_that_the_store_has_lost_follows_the_stored_events() {
    let (setup, mcp, ids) = complete_detached(Loses::Answers).await;

    let delivered = delivered(&mcp, &ids[0]).await;

    assert_eq!(delivered, [PROGRESS, PROGRESS, PROGRESS, "done:a"]);
    drop(setup);
}

/// The client must have an id from which it can resume before the answer starts.
#[tokio::test]
async fn an_answer_that_is_not_stored_at_all_follows_the_named_id() {
    for loses in [Loses::Messages, Loses::Everything] {
        let (setup, mcp, ids) = complete_detached(loses).await;

        let delivered = delivered(&mcp, &ids[0]).await;

        assert_eq!(delivered, [&*format!("priming {}", ids[0]), "done:a"]);
        drop(setup);
    }
}

/// The store would not send anything else on the stream on which the client is waiting.
#[tokio::test]
async fn an_answer_is_sent_though_the_replay_of_the_store_does_not_end() {
    let clock = StoppedClock::stop();
    let (setup, mcp, ids) = complete_detached(Loses::AnswersAndTheEnd).await;

    let mut resumed = mcp.resume(&ids[0]).await;
    assert_eq!(resumed.head().await.status, 200);
    for _ in 0..3 {
        let event = resumed.event().await.expect("an event from the store");
        assert_eq!(text_of(&event), PROGRESS);
    }
    setup.assert_usable(&mcp).await;
    clock.advance(SILENCE + TICK).await;

    let answer = resumed.event().await.expect("the answer");
    assert_eq!(text_of(&answer), "done:a");
    assert!(resumed.event().await.is_none());
    assert!(resumed.is_complete(), "the stream has ended properly");
}

/// Any other response would keep the client polling.
/// The TypeScript SDK resumes only after an event with an id.
#[tokio::test]
async fn a_client_without_a_session_can_poll_again_even_if_it_has_missed_nothing() {
    let plan = Plan::of(Server::Wrapped).stored();
    let plan = plan.config(|_| Mode::StatelessSse.config().with_sse_keep_alive(None));
    let setup = plan.start().await;
    let mcp = Mcp::stateless(setup.served.addr, PATH);
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let id = call
        .event()
        .await
        .and_then(|event| event.id)
        .expect("an id");
    call.fin();

    let mut polled = mcp.resume(&id).await;

    assert_eq!(polled.head().await.status, 200);
    let event = polled.event().await.expect("an event");
    assert!(
        event.is_priming() && event.id.as_deref() == Some(&*id),
        "{event:?}"
    );
    assert!(polled.event().await.is_none());
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert_eq!(delivered(&mcp, &id).await, ["done:a"]);
}

#[tokio::test]
async fn a_resume_of_a_cancelled_call_gets_only_the_error() {
    let clock = StoppedClock::stop();
    let (setup, mcp, ids) = cut(Loses::Nothing).await;
    clock.advance(GRACE + TICK).await;
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(setup.events.ended(&mcp, 1).await, orphaned);

    assert_eq!(delivered(&mcp, &ids[0]).await, ["error -32800"]);
}

/// Completes call 1 while its client is disconnected.
///
/// Returns the ids of the events that the client has received.
async fn complete_detached(loses: Loses) -> (Setup, Mcp, Vec<String>) {
    let (setup, mcp, ids) = cut(loses).await;
    setup.witness.release("a");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    (setup, mcp, ids)
}

/// Disconnects call 1's client after the first four of its five events, returning their ids.
async fn cut(loses: Loses) -> (Setup, Mcp, Vec<String>) {
    let store = Lossy {
        store: Store::default(),
        loses,
    };
    let plan = Plan::with_grace(Server::Wrapped);
    let plan = plan.sessions(|local| local.with_event_store(Arc::new(store)));
    let (setup, mcp) = plan.client().await;
    let arguments = json!({ "label": "a", "events": 3 });
    let mut call = mcp.call(1, "chatty", arguments).await;
    call.head().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        let event = call.event().await.expect("an event");
        ids.push(event.id.expect("an id"));
    }
    call.fin();
    setup.events.detached(&mcp, 1).await;
    (setup, mcp, ids)
}

/// Returns what a resume delivers, up to the end of its stream.
async fn delivered(mcp: &Mcp, last_event_id: &str) -> Vec<String> {
    let mut resumed = mcp.resume(last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    let mut delivered = Vec::new();
    while let Some(event) = resumed.event().await {
        delivered.push(match &event.id {
            Some(id) if event.is_priming() => format!("priming {id}"),
            _ => text_of(&event),
        });
    }
    assert!(resumed.is_complete(), "the stream has ended properly");
    delivered
}

fn text_of(event: &SseEvent) -> String {
    let message = event.json();
    let texts = [&message["method"], &message["result"]["content"][0]["text"]];
    let text = texts.into_iter().find_map(|text| text.as_str());
    text.map_or_else(
        || format!("error {}", message["error"]["code"]),
        str::to_owned,
    )
}

// === impl Lossy ===

impl Lossy {
    fn has(&self, event: &ServerSseMessage) -> bool {
        let is_answer = matches!(
            event.message.as_deref(),
            Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_))
        );
        match self.loses {
            Loses::Nothing => true,
            Loses::Answers | Loses::AnswersAndTheEnd => !is_answer,
            Loses::Messages | Loses::Everything => event.message.is_none(),
        }
    }
}

#[async_trait::async_trait]
impl EventStore for Lossy {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        self.store.store_event(stream, event).await
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        if self.loses == Loses::Everything {
            return Err("the store is unreachable".into());
        }
        let events = self.store.replay_events_after(last).await?;
        let events: Vec<_> = events.collect().await;
        let left = events.into_iter().filter(|event| self.has(event));
        let left: Vec<_> = left.collect();
        let left = stream::iter(left);
        Ok(match self.loses {
            Loses::AnswersAndTheEnd => Box::pin(left.chain(stream::pending())),
            _ => Box::pin(left),
        })
    }
}
