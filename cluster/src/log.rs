//! Log lines of background tasks, which run once.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Logs a line. A subscriber that panics, say, because its stderr is closed, ends no task.
pub(crate) fn log(line: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(line));
}
