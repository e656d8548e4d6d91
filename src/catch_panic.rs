//! Catches panics in user code, so that they do not affect anything else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an action that calls user code, possibly a destructor. Returns `None` if it panics.
///
/// Can itself be called from a destructor.
pub(crate) fn catch_panic<R>(action: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(action)).ok()
}
