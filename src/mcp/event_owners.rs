//! The sessions that own the events in a store.
//!
//! A store gives its events to every client that names one: neither rmcp nor the store asks which session an event is of. So
//! the manager notes the ids that it sees go out, and refuses them to every other session, and to clients without a session.
//! The store judges ids that the manager has not seen, because their sessions may have been served elsewhere.

use std::{
    collections::{HashMap, VecDeque, hash_map::RandomState},
    hash::BuildHasher,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use futures_util::stream;
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
};

/// How many event ids are noted, the latest of all sessions: 65,536, about 3 MiB.
const MAX_NOTED: usize = 65_536;

/// The sessions of events, both by keyed hashes.
#[derive(Debug, Default)]
pub(super) struct EventOwners {
    names: RandomState,
    state: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    sessions: HashMap<u64, u64>,
    oldest: VecDeque<u64>,
}

/// A store as clients without a session see it.
struct Sessionless {
    store: Arc<dyn EventStore>,
    owners: Arc<EventOwners>,
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, EventStoreError>> + Send + 'a>>;

// === impl EventOwners ===

impl EventOwners {
    /// Notes an event of a session that goes out.
    pub(super) fn note(&self, session: &str, event: &ServerSseMessage) {
        let Some(id) = &event.event_id else {
            return;
        };
        let (session, event) = (self.names.hash_one(session), self.names.hash_one(&**id));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Noted { sessions, oldest } = &mut *state;
        if sessions.insert(event, session).is_none() {
            oldest.push_back(event);
        }
        if oldest.len() > MAX_NOTED
            && let Some(forgotten) = oldest.pop_front()
        {
            sessions.remove(&forgotten);
        }
    }

    /// Whether an event is of another session than this one, or of any if this is none.
    pub(super) fn is_foreign(&self, session: Option<&str>, event_id: &str) -> bool {
        let session = session.map(|session| self.names.hash_one(session));
        let event = self.names.hash_one(event_id);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = state.sessions.get(&event).copied();
        owner.is_some() && owner != session
    }

    /// The store as clients without a session may use it.
    pub(super) fn guard(self: &Arc<Self>, store: Arc<dyn EventStore>) -> Arc<dyn EventStore> {
        let owners = self.clone();
        Arc::new(Sessionless { store, owners })
    }
}

// === impl Sessionless ===

/// Written as `async_trait` would expand it.
impl EventStore for Sessionless {
    fn store_event<'s, 'i, 'e, 'a>(
        &'s self,
        stream_id: &'i str,
        event: &'e ServerSseMessage,
    ) -> Boxed<'a, EventId>
    where
        's: 'a,
        'i: 'a,
        'e: 'a,
        Self: 'a,
    {
        self.store.store_event(stream_id, event)
    }

    fn replay_events_after<'s, 'i, 'a>(&'s self, last_event_id: &'i str) -> Boxed<'a, EventStream>
    where
        's: 'a,
        'i: 'a,
        Self: 'a,
    {
        if self.owners.is_foreign(None, last_event_id) {
            let nothing: EventStream = Box::pin(stream::empty());
            return Box::pin(async { Ok(nothing) });
        }
        self.store.replay_events_after(last_event_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(owners: &EventOwners, session: &str, id: &str) {
        let mut event = ServerSseMessage::default();
        event.event_id = Some(id.to_owned());
        owners.note(session, &event);
    }

    #[test]
    fn an_event_is_foreign_to_all_but_its_session_and_an_unknown_one_to_nobody() {
        let owners = EventOwners::default();
        note(&owners, "a", "1");
        assert!(!owners.is_foreign(Some("a"), "1"));
        assert!(owners.is_foreign(Some("b"), "1"));
        assert!(owners.is_foreign(None, "1"));
        assert!(!owners.is_foreign(Some("b"), "2"));
        assert!(!owners.is_foreign(None, "2"));
    }

    #[test]
    fn the_latest_events_are_known_and_no_more_than_these() {
        let owners = EventOwners::default();
        for id in 0..=MAX_NOTED {
            note(&owners, "a", &id.to_string());
        }
        assert!(!owners.is_foreign(Some("b"), "0"), "forgotten");
        assert!(owners.is_foreign(Some("b"), "1"));
        assert!(owners.is_foreign(Some("b"), &MAX_NOTED.to_string()));
        let state = owners.state.lock().unwrap();
        assert_eq!(state.sessions.len(), MAX_NOTED);
        assert_eq!(state.oldest.len(), MAX_NOTED);
    }
}
