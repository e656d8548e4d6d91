//! Calls of the user's code, whose panics affect nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an action that calls into the user's code, be it a destructor. `None` if it panicked. The caller may be in a
/// destructor itself.
pub(crate) fn catch_panic<R>(action: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(action)).ok()
}
