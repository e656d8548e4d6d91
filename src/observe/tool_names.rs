//! The tool names that may become metric labels.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::SharedString;

use crate::call::CallInfo;

/// Tool names that [`Metrics`](super::Metrics) may use as labels (feature `metrics`).
///
/// Clones share the same names. Further names can be added at any time, for example by a gateway that reads them from the server's
/// `tools/list`. A call's label does not change while it is running, so a name added in the meantime only applies to later calls.
///
/// ```
/// use mcp_cancel_on_disconnect::{
///     CancelOnDisconnectLayer,
///     observe::{Metrics, ToolNames},
/// };
///
/// let names = ToolNames::new();
/// let layer = CancelOnDisconnectLayer::new().observe(Metrics::new().tool_names(names.clone()));
///
/// // As soon as the server has listed its tools:
/// assert!(names.add("upload"));
/// assert!(!names.add("upload"));
/// # drop(layer);
/// ```
#[derive(Clone, Default)]
pub struct ToolNames(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Maps each name to the number of the first call that may have it as a label.
    ///
    /// [`ToolNames::on_started`] raises `last_started` under this lock, so when a name is added, the call with that number has not
    /// started yet.
    names: RwLock<HashMap<SharedString, u64>>,
    /// The highest number of any call started so far.
    last_started: AtomicU64,
}

// === impl ToolNames ===

impl ToolNames {
    /// Maximum number of names that [`add`](Self::add) accepts. Each name adds about 50 series.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::ToolNames;
    ///
    /// assert_eq!(ToolNames::MAX, 256);
    /// ```
    pub const MAX: usize = 256;

    /// Maximum length in bytes of a name that [`add`](Self::add) accepts, as in the MCP specification.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::ToolNames;
    ///
    /// assert!(!ToolNames::new().add("x".repeat(ToolNames::MAX_LENGTH + 1)));
    /// ```
    pub const MAX_LENGTH: usize = 128;

    /// Creates an empty set of names.
    ///
    /// ```
    /// let names = mcp_cancel_on_disconnect::observe::ToolNames::new();
    /// assert_eq!(format!("{names:?}"), "{}");
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a name for calls starting from now on. Returns `true` if it was added.
    ///
    /// Returns `false` if the name is already known, if it is longer than [`MAX_LENGTH`](Self::MAX_LENGTH), or if there are already
    /// [`MAX`](Self::MAX) names. In the last two cases, calls to its tool are labelled `other`.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::ToolNames;
    ///
    /// let names = ToolNames::new();
    /// assert!(names.add("upload"));
    /// assert!(format!("{names:?}").contains("upload"));
    /// ```
    pub fn add(&self, name: impl Into<String>) -> bool {
        let name = name.into();
        let mut names = self.0.names.write().unwrap_or_else(PoisonError::into_inner);
        if name.len() > Self::MAX_LENGTH
            || names.len() >= Self::MAX
            || names.contains_key(name.as_str())
        {
            return false;
        }
        let first = self.0.last_started.load(Ordering::Relaxed) + 1;
        names.insert(name.into(), first);
        true
    }

    /// Records that a call has started. If its tool's name is already known, it becomes the call's label.
    pub(super) fn on_started(&self, call: &CallInfo) {
        // Hold the lock, so that `last_started` does not change while a name is being added.
        let _names = self.0.names.read().unwrap_or_else(PoisonError::into_inner);
        let number = u64::from(call.id());
        self.0.last_started.fetch_max(number, Ordering::Relaxed);
    }

    /// Returns the call's tool name, or `None` if it was not yet known when the call started.
    pub(super) fn label_for(&self, call: &CallInfo, tool: &str) -> Option<SharedString> {
        let names = self.0.names.read().unwrap_or_else(PoisonError::into_inner);
        let (name, first) = names.get_key_value(tool)?;
        (u64::from(call.id()) >= *first).then(|| name.clone())
    }
}

impl fmt::Debug for ToolNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.names.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_set().entries(names.keys()).finish()
    }
}
