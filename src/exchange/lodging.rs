//! A call, and the home in which it lives.

use std::sync::{Arc, OnceLock};

use crate::{
    call::CallInfo,
    registry::{Core, Home, Tracked},
};
#[cfg(feature = "rmcp")]
use crate::{call::Key, registry::Registry};

pub(super) struct Lodging<T> {
    pub(super) info: CallInfo,
    home: Arc<Home<T>>,
    /// Where it lives since it is known better whose session it is of. It moves at most once.
    moved: OnceLock<Arc<Home<T>>>,
}

// === impl Lodging ===

impl<T: Tracked> Lodging<T> {
    pub(super) fn new(info: CallInfo, home: Arc<Home<T>>) -> Self {
        Self {
            info,
            home,
            moved: OnceLock::new(),
        }
    }

    /// Runs one operation on the core in which it lives.
    pub(super) fn with<R>(&self, operation: impl FnOnce(&mut Core<T>) -> R) -> R {
        // It moves while nobody is at either core, so nobody looks for it where it was.
        let has_moved = || self.moved.get().is_some();
        match self.home.with_unless(has_moved, operation) {
            Ok(result) => result,
            Err(operation) => self.latest().with(operation),
        }
    }

    /// Moves it to the session that it turned out to be of, where it claims its id.
    #[cfg(feature = "rmcp")]
    pub(super) fn go(&self, registry: &Registry<T>, to: Key) {
        registry.move_call(self.info.id(), self.latest(), to, |home| {
            // Else it has moved before, and is where it was found.
            let _first = self.moved.set(home.clone());
        });
    }

    fn latest(&self) -> &Arc<Home<T>> {
        self.moved.get().unwrap_or(&self.home)
    }
}
