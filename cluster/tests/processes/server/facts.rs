//! Writes events to stdout as lines of JSON.

use std::{
    fmt::Display,
    io::{Write as _, stdout},
    time::SystemTime,
};

use serde_json::{Value, json};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Writes an event with the current time.
pub(crate) fn record(event: &str, more: Value) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut fact = json!({ "event": event, "at": now.unwrap_or_default().as_secs_f64() });
    if let (Some(fact), Value::Object(more)) = (fact.as_object_mut(), more) {
        fact.extend(more);
    }
    // Each line is written at once, so that the last line of a killed process is complete.
    let line = format!("{fact}\n");
    let mut out = stdout().lock();
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

/// Returns the first 80 characters of an id.
pub(crate) fn short(id: &impl Display) -> String {
    id.to_string().chars().take(80).collect()
}

/// Writes a fact for each heartbeat that reports turned-away clients.
pub(crate) struct TurnedAway;

impl<S: Subscriber> Layer<S> for TurnedAway {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if event.metadata().target() == "mcp_cancel_cluster::turned_away" {
            record("turned away", json!({}));
        }
    }
}
