// The event store for the programs that need one. `pages` copies it into their reports.

#[derive(Default)]
struct Store(Mutex<Vec<(String, ServerSseMessage)>>);

#[async_trait::async_trait]
impl EventStore for Store {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut events = self.0.lock().unwrap();
        let id = format!("event-{}", events.len());
        let mut event = event.clone();
        event.event_id = Some(id.clone());
        events.push((stream.to_owned(), event));
        Ok(id)
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let last: usize = last.strip_prefix("event-").ok_or("unknown id")?.parse()?;
        let events = self.0.lock().unwrap().clone();
        let stream = events.get(last).ok_or("unknown id")?.0.clone();
        let later = events.into_iter().skip(last + 1);
        let later = later.filter(move |(of, _)| *of == stream);
        Ok(Box::pin(futures_util::stream::iter(
            later.map(|(_, event)| event),
        )))
    }
}
