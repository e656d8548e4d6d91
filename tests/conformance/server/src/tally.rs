//! Counts the outcomes of calls as reported by the layer. Clients may be served correctly even while the layer
//! loses a call.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use mcp_cancel_on_disconnect::{CallId, Event};
use serde_json::{Value, json};

/// How many calls have been observed, and their outcomes.
#[derive(Default)]
pub(crate) struct Tally(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    started: usize,
    ended: BTreeMap<String, usize>,
    /// By method and request id.
    open: HashMap<CallId, String>,
}

// === impl Tally ===

impl Tally {
    pub(crate) fn observer(self: Arc<Self>) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        move |event| {
            let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Event::Started { call, .. } => {
                    counts.started += 1;
                    let name = format!("{} {}", call.method(), call.request_id());
                    counts.open.insert(call.id(), name);
                }
                Event::Ended { call, outcome, .. } => {
                    counts.open.remove(&call.id());
                    *counts.ended.entry(format!("{outcome:?}")).or_default() += 1;
                }
                _ => {}
            }
        }
    }

    /// Returns the report as one line. `registered` is how many calls in flight the registry counts.
    pub(crate) fn report(&self, registered: usize) -> Value {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut open: Vec<_> = counts.open.values().collect();
        open.sort();
        json!({
            "started": counts.started,
            "ended": counts.ended,
            "open": open,
            "registered": registered,
        })
    }
}
