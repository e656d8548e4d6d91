//! Catches panics in the user's code, which must not affect anything else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an action that calls the user's code, which may be a destructor. Returns `None` if it panicked.
///
/// May be called in a destructor.
pub(crate) fn catch_panic<R>(action: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(action)).ok()
}
