//! Judges whether the server became idle and whether it grew. Compares its state after the second round with that
//! after the first.

use super::history::History;
use crate::fact::Gauge;

/// How much an idle server may differ.
const DESCRIPTORS: usize = 4;
const TASKS: usize = 6;
const ALLOCATED_KIB: usize = 2 * 1024;

/// The server's state in the first and the last quiet period.
#[derive(Debug, Clone)]
pub struct Health {
    pub first: Gauge,
    pub last: Gauge,
}

// === impl Health ===

impl Health {
    /// Returns the newest gauges. The first is from the first 2.4 s of the first quiet period, the second from
    /// the last quiet period.
    ///
    /// Returns `None` if there was no quiet period, or one without a gauge.
    pub(super) fn of(history: &History) -> Option<Self> {
        let gauge = |from: u64, to: u64| {
            let mut within = history
                .gauges
                .iter()
                .filter(|(at, _)| (from..=to).contains(at));
            within.next_back().map(|(_, gauge)| gauge.clone())
        };
        let (&first, &last) = (history.quiet.first()?, history.quiet.last()?);
        Some(Self {
            first: gauge(first, first + 2_400_000)?,
            last: gauge(last, history.end)?,
        })
    }

    /// Describes which calls and sessions are left in a quiet period, and what has grown since the first.
    pub(super) fn leaks(&self) -> Vec<String> {
        let Self { first, last } = self;
        let mut leaks = Vec::new();
        for (when, gauge) in [("the first round", first), ("the second round", last)] {
            if gauge.calls > 0 {
                leaks.push(format!("{} calls are left after {when}", gauge.calls));
            }
            for (route, ids) in gauge.sessions.iter().filter(|(_, ids)| !ids.is_empty()) {
                leaks.push(format!(
                    "{} sessions of {route} are left after {when}, the first is {:?}",
                    ids.len(),
                    ids.first()
                ));
            }
        }
        if last.descriptors > first.descriptors + DESCRIPTORS {
            leaks.push(format!(
                "descriptors: {} and then {}",
                first.descriptors, last.descriptors
            ));
        }
        if last.tasks > first.tasks + TASKS {
            leaks.push(format!("tasks: {} and then {}", first.tasks, last.tasks));
        }
        if last.allocated_kib > first.allocated_kib + ALLOCATED_KIB {
            leaks.push(format!(
                "memory: {} KiB and then {} KiB",
                first.allocated_kib, last.allocated_kib
            ));
        }
        leaks
    }
}
