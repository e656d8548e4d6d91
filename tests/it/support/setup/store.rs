//! In-memory stores for events and for sessions.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::stream;
use rmcp::model::JsonRpcMessage;
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage, SessionState,
    SessionStore, SessionStoreError,
};

/// The id of the first event in a [`Store`].
pub(crate) const FIRST_STORED: &str = "event-0";

/// Events in memory, under ids that do not reveal their stream.
#[derive(Default)]
pub(crate) struct Store(Mutex<BTreeMap<usize, (String, ServerSseMessage)>>);

/// A store that fails in one way for each flag that has been set.
#[derive(Default)]
pub(crate) struct Failing {
    store: Store,
    /// Answers and errors are not stored.
    pub(crate) rejects_answers: AtomicBool,
    /// The events without a message with which a stream starts are not stored.
    pub(crate) rejects_streams: AtomicBool,
    /// Nothing is replayed.
    pub(crate) rejects_replays: AtomicBool,
}

/// Sessions in memory, from which they can be restored.
#[derive(Default)]
pub(crate) struct SavedSessions(Mutex<HashMap<String, SessionState>>);

// === impl Store ===

#[async_trait::async_trait]
impl EventStore for Store {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = events.len();
        let id = format!("event-{number}");
        let mut event = event.clone();
        event.event_id = Some(id.clone());
        events.insert(number, (stream.to_owned(), event));
        Ok(id)
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let number: usize = last.strip_prefix("event-").unwrap_or_default().parse()?;
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, _) = events.get(&number).ok_or("no such event")?;
        let later = events.range(number + 1..).map(|(_, event)| event);
        let later = later.filter(|(of, _)| of == stream);
        let later: Vec<_> = later.map(|(_, event)| event.clone()).collect();
        Ok(Box::pin(stream::iter(later)))
    }
}

// === impl Failing ===

#[async_trait::async_trait]
impl EventStore for Failing {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let message = event.message.as_deref();
        let fails = match message {
            None => &self.rejects_streams,
            Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)) => &self.rejects_answers,
            Some(_) => return self.store.store_event(stream, event).await,
        };
        if fails.load(Ordering::Relaxed) {
            return Err("the store fails".into());
        }
        self.store.store_event(stream, event).await
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        if self.rejects_replays.load(Ordering::Relaxed) {
            return Err("the store fails".into());
        }
        self.store.replay_events_after(last).await
    }
}

// === impl SavedSessions ===

#[async_trait::async_trait]
impl SessionStore for SavedSessions {
    async fn load(&self, id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(sessions.get(id).cloned())
    }

    async fn store(&self, id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(id.to_owned(), state.clone());
        Ok(())
    }

    async fn delete(&self, id: &str) -> Result<(), SessionStoreError> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(id);
        Ok(())
    }
}
