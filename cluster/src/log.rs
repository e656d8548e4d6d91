//! Log lines of tasks that nobody starts again.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Logs a line. A subscriber that panics, say, because its stderr is a pipe that nobody reads, ends nothing.
pub(crate) fn log(line: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(line));
}
