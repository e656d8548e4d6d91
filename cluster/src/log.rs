//! Logging for the background tasks, of which an instance has only one each.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Logs a line, even if that panics.
///
/// A subscriber may panic, for example because stderr is closed. That must not end the task.
pub(crate) fn log(line: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(line));
}
