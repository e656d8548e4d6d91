//! Warnings about ongoing conditions, each logged at most once a minute.

use std::{
    fmt::Display,
    mem,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::{lock::lock, log::log};

/// Minimum interval between two log lines from the same warning.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A warning that remembers when it was last logged.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last_logged: Option<Instant>,
    /// Whether the warning has been logged since it was last cleared.
    is_active: bool,
}

// === impl RateLimitedWarning ===

impl RateLimitedWarning {
    /// Logs the warning, unless it has already been logged within the last minute.
    pub(crate) fn warn(&self, message: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::warn!(target: "mcp_cancel_cluster", "{message}"));
        }
    }

    /// Logs the message as an error instead, under the same limit.
    pub(crate) fn error(&self, message: &dyn Display) {
        if self.is_due(Instant::now()) {
            log(|| tracing::error!(target: "mcp_cancel_cluster", "{message}"));
        }
    }

    /// Marks the condition as resolved. Returns `true` if it was logged since the previous call.
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
