//! Counts calls, sessions, bytes, descriptors and tasks once a second.

use std::{
    alloc::System,
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cap::Cap;
use mcp_cancel_on_disconnect::Calls;
use soak::fact::{Fact, Gauge, Log};
use tokio::{runtime::Handle, time::sleep};

use crate::app::{App, Sessions};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// The layers and session managers that exist at the moment.
#[derive(Default)]
pub(crate) struct Gauges(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    /// From all layers but old ones without calls. If an old one still has calls in flight, that is a leak.
    calls: Vec<Calls>,
    sessions: Vec<(&'static str, Sessions)>,
    /// From the drained server, whose sessions end along with it.
    replaceable: Vec<(&'static str, Sessions)>,
}

// === impl Gauges ===

impl Gauges {
    pub(crate) fn add(&self, app: &App) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.calls.push(app.calls.clone());
        parts.sessions.extend(app.sessions.iter().cloned());
    }

    /// Replaces the drained server's session managers after it has been restarted.
    pub(crate) fn replace(&self, app: &App) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.calls.push(app.calls.clone());
        parts.replaceable.clone_from(&app.sessions);
    }

    /// Reads all gauges. Also drops old layers that have no calls.
    async fn read(&self) -> Gauge {
        let (calls, sessions) = {
            let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let calls = parts.calls.iter().map(Calls::len).sum();
            // Keeps the first one, which is never replaced, and the newest three, which may still be in use.
            let old = parts.calls.len().saturating_sub(3);
            let mut position = 0;
            parts.calls.retain(|calls| {
                position += 1;
                position == 1 || position > old || !calls.is_empty()
            });
            let sessions: Vec<_> = parts
                .sessions
                .iter()
                .chain(&parts.replaceable)
                .cloned()
                .collect();
            (calls, sessions)
        };
        let mut open = BTreeMap::new();
        for (route, sessions) in sessions {
            let ids = sessions.local().sessions.read().await;
            open.insert(
                route.to_owned(),
                ids.keys().map(ToString::to_string).collect(),
            );
        }
        Gauge {
            calls,
            sessions: open,
            allocated_kib: MEMORY.allocated() / 1024,
            descriptors: fs::read_dir("/proc/self/fd").map_or(0, Iterator::count),
            tasks: Handle::current().metrics().num_alive_tasks(),
        }
    }
}

/// Records the gauges for as long as the process lives.
pub(crate) async fn write(gauges: Arc<Gauges>, log: Log) {
    loop {
        log.write(Fact::Gauge(gauges.read().await));
        sleep(Duration::from_secs(1)).await;
    }
}
