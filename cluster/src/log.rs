//! Logging for background tasks. Each instance has only one of each task, so a panicking subscriber must not end it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Logs a line, ignoring any panic.
///
/// A subscriber may panic, for example because stderr is closed, and that must not end the task.
pub(crate) fn log(line: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(line));
}
