//! What happens, as lines of JSON on stdout.

use std::{
    fmt::Display,
    io::{Write as _, stdout},
    time::SystemTime,
};

use serde_json::{Value, json};

/// Writes down that something happened, now.
pub(crate) fn note(event: &str, more: Value) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut fact = json!({ "event": event, "at": now.unwrap_or_default().as_secs_f64() });
    if let (Some(fact), Value::Object(more)) = (fact.as_object_mut(), more) {
        fact.extend(more);
    }
    // One write for a line: what a process wrote before it was killed is whole.
    let line = format!("{fact}\n");
    let mut out = stdout().lock();
    let _nobody_reads = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

/// The beginning of an id, which may be of any length.
pub(crate) fn short(id: &impl Display) -> String {
    id.to_string().chars().take(80).collect()
}
