//! An in-memory event store, for the routes that have one.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures_util::stream::unfold;
use rmcp::{
    model::JsonRpcMessage,
    transport::streamable_http_server::session::{
        EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
    },
};
use soak::setup::Store;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

/// How long a stream without new events is kept. No client is disconnected for that long.
const RETENTION: Duration = Duration::from_secs(12);

/// The event store.
pub(crate) struct Events {
    kind: Store,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    streams: HashMap<String, Stream>,
    /// The streams by the time of their last event.
    latest: VecDeque<(Instant, String)>,
}

struct Stream {
    /// Their ids are `<stream>#<number>`.
    events: Arc<Mutex<Vec<ServerSseMessage>>>,
    /// How many events there are.
    length: watch::Sender<usize>,
    touched: Instant,
}

/// A client that is reading a stream's events.
struct Reader {
    events: Arc<Mutex<Vec<ServerSseMessage>>>,
    next: usize,
    /// `None` if it does not wait for more.
    length: Option<watch::Receiver<usize>>,
}

// === impl Events ===

impl Events {
    pub(crate) fn new(kind: Store) -> Self {
        let state = Arc::default();
        tokio::spawn(sweep(Arc::downgrade(&state)));
        Self { kind, state }
    }
}

/// Removes expired streams once a second until the store is dropped, so that an idle server has none.
async fn sweep(state: Weak<Mutex<State>>) {
    while let Some(state) = state.upgrade() {
        lock(&state).remove_expired(Instant::now());
        drop(state);
        sleep(Duration::from_secs(1)).await;
    }
}

#[async_trait::async_trait]
impl EventStore for Events {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.latest.push_back((now, stream.to_owned()));
        let entry = state.streams.entry(stream.to_owned());
        let stored = entry.or_insert_with(|| Stream::new(now));
        stored.touched = now;
        let mut event = event.clone();
        let length = {
            let mut events = lock(&stored.events);
            event.event_id = Some(format!("{stream}#{}", events.len()));
            events.push(event.clone());
            events.len()
        };
        stored.length.send_replace(length);
        Ok(event.event_id.expect("just set"))
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let (stream, number) = last.rsplit_once('#').ok_or("not an id of this store")?;
        let number: usize = number.parse()?;
        let state = lock(&self.state);
        let stream = state.streams.get(stream).ok_or("no such stream")?;
        let is_following = self.kind == Store::Follows;
        let reader = Reader {
            events: stream.events.clone(),
            next: number + 1,
            length: is_following.then(|| stream.length.subscribe()),
        };
        Ok(Box::pin(unfold(reader, Reader::read)))
    }
}

// === impl State ===

impl State {
    /// Removes the streams that no client will resume any more.
    fn remove_expired(&mut self, now: Instant) {
        while let Some((at, _)) = self.latest.front()
            && now.duration_since(*at) > RETENTION
        {
            let Some((at, stream)) = self.latest.pop_front() else {
                return;
            };
            if self
                .streams
                .get(&stream)
                .is_some_and(|stream| stream.touched == at)
            {
                self.streams.remove(&stream);
            }
        }
    }
}

// === impl Stream ===

impl Stream {
    fn new(now: Instant) -> Self {
        Self {
            events: Arc::default(),
            length: watch::Sender::new(0),
            touched: now,
        }
    }
}

// === impl Reader ===

impl Reader {
    /// Returns the next event. `None` after the answer, at the end of a replay, or once the stream has been removed.
    async fn read(mut self) -> Option<(ServerSseMessage, Self)> {
        loop {
            let event = lock(&self.events).get(self.next).cloned();
            if let Some(event) = event {
                self.next += 1;
                if is_answer(&event) {
                    self.length = None;
                }
                return Some((event, self));
            }
            // Fails once the stream has been removed.
            self.length.as_mut()?.changed().await.ok()?;
        }
    }
}

fn is_answer(event: &ServerSseMessage) -> bool {
    let message = event.message.as_deref();
    message.is_some_and(|message| {
        matches!(
            message,
            JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)
        )
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
