//! Warnings that say once a minute what goes on all the time.

use std::{
    fmt::Display,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::log::log;

/// How often one warning is logged: once a minute.
const EVERY: Duration = Duration::from_secs(60);

/// One warning, and when it was last logged.
#[derive(Debug, Default)]
pub(crate) struct WarnRarely(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged: Option<Instant>,
    /// It was logged, and nobody said since that it is over.
    goes_on: bool,
}

// === impl WarnRarely ===

impl WarnRarely {
    /// Logs the warning, unless it was logged less than a minute ago.
    pub(crate) fn warn(&self, what: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::warn!(target: "mcp_cancel_cluster", "{what}"));
        }
    }

    /// Logs it as an error, and as rarely.
    pub(crate) fn error(&self, what: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::error!(target: "mcp_cancel_cluster", "{what}"));
        }
    }

    /// What was warned of is over. Says whether it was warned of since the last time.
    pub(crate) fn is_over(&self) -> bool {
        mem::take(&mut self.state().goes_on)
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_due = state
            .logged
            .is_none_or(|logged| now.duration_since(logged) >= EVERY);
        if is_due {
            state.logged = Some(now);
            state.goes_on = true;
        }
        is_due
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_due_once_a_minute() {
        let warning = WarnRarely::default();
        let start = Instant::now();
        let due = |seconds| warning.is_due(start + Duration::from_secs(seconds));
        assert_eq!(
            [0, 1, 59, 60, 61, 300].map(due),
            [true, false, false, true, false, true]
        );
    }

    #[test]
    fn what_was_warned_of_is_over_once() {
        let warning = WarnRarely::default();
        assert!(!warning.is_over());
        warning.warn(&"it rains");
        assert!(warning.is_over());
        assert!(!warning.is_over());
    }
}
