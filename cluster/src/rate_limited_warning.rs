//! Warnings about continuing conditions, logged at most once a minute.

use std::{
    fmt::Display,
    mem,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::{lock::lock, log::log};

/// Minimum interval between two log lines of one warning: 60 s.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// One warning, and the time at which it was last logged.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last_logged: Option<Instant>,
    /// The warning was logged, and not cleared since.
    is_active: bool,
}

// === impl RateLimitedWarning ===

impl RateLimitedWarning {
    /// Logs the warning, unless it was logged less than a minute ago.
    pub(crate) fn warn(&self, message: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::warn!(target: "mcp_cancel_cluster", "{message}"));
        }
    }

    /// Logs an error, with the same limit.
    pub(crate) fn error(&self, message: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::error!(target: "mcp_cancel_cluster", "{message}"));
        }
    }

    /// Ends the condition. Returns `true` if it was logged since the last call of this method.
    pub(crate) fn clear(&self) -> bool {
        mem::take(&mut self.state().is_active)
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_due = state
            .last_logged
            .is_none_or(|last_logged| now.duration_since(last_logged) >= LOG_INTERVAL);
        if is_due {
            state.last_logged = Some(now);
            state.is_active = true;
        }
        is_due
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_due_once_a_minute() {
        let warning = RateLimitedWarning::default();
        let start = Instant::now();
        let is_due_at = |seconds| warning.is_due(start + Duration::from_secs(seconds));
        assert_eq!(
            [0, 1, 59, 60, 61, 300].map(is_due_at),
            [true, false, false, true, false, true]
        );
    }

    #[test]
    fn a_warning_is_cleared_once() {
        let warning = RateLimitedWarning::default();
        assert!(!warning.clear());
        warning.warn(&"a warning");
        assert!(warning.clear());
        assert!(!warning.clear());
    }
}
