//! Log lines of background tasks, each of which runs only once per instance.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Logs a line. A subscriber that panics, for example on a closed stderr, does not end the task.
pub(crate) fn log(line: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(line));
}
