//! Counts ended sessions by reason.

use std::sync::atomic::{AtomicU64, Ordering};

use super::session::EndReason;

/// The reasons a session can end, as metric label values.
const LABELS: [&str; 9] = [
    "deleted",
    "idle",
    "lost",
    "made_room",
    "shutdown",
    "exited",
    "pipes_closed",
    "stdin_not_read",
    "cancel_not_answered",
];

/// The number of ended sessions for each label in [`LABELS`].
#[derive(Debug, Default)]
pub(super) struct EndCounts([AtomicU64; LABELS.len()]);

// === impl EndCounts ===

impl EndCounts {
    pub(super) fn record(&self, reason: EndReason) {
        let label = label(reason);
        let counts = LABELS.iter().zip(&self.0);
        if let Some((_, count)) = counts.into_iter().find(|(name, _)| **name == label) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns each reason's label along with its count.
    pub(super) fn by_label(&self) -> Vec<(&'static str, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        LABELS.into_iter().zip(counts).collect()
    }
}

fn label(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Deleted => "deleted",
        EndReason::Idle => "idle",
        EndReason::Lost => "lost",
        EndReason::Evicted => "made_room",
        EndReason::Shutdown(_) => "shutdown",
        EndReason::Exited => "exited",
        EndReason::Closed => "pipes_closed",
        EndReason::Stuck => "stdin_not_read",
        EndReason::Overdue => "cancel_not_answered",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_reason_has_a_count_of_its_own() {
        let counts = EndCounts::default();
        for reason in [
            EndReason::Deleted,
            EndReason::Idle,
            EndReason::Lost,
            EndReason::Evicted,
            EndReason::Shutdown(Duration::ZERO),
            EndReason::Exited,
            EndReason::Closed,
            EndReason::Stuck,
            EndReason::Overdue,
        ] {
            counts.record(reason);
        }
        assert!(counts.by_label().iter().all(|(_, count)| *count == 1));
    }
}
