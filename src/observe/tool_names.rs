//! The names of tools that may become labels of metrics.

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

/// Names of tools that [`Metrics`](super::Metrics) may show (feature `metrics`).
///
/// Names can be added at any time, for example by a gateway that reads them from the server's `tools/list`. Clones share the names. A
/// call has the same label from its start to its end. So a name that is added while the call is running counts only for later calls.
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
    /// Each name with the number of the first call that may have it as a label.
    ///
    /// [`ToolNames::on_started`] holds the lock while it raises `last_started`. So a call with such a number has not started when its
    /// name is added.
    names: RwLock<HashMap<SharedString, u64>>,
    /// The highest number of a call that has started.
    last_started: AtomicU64,
}

// === impl ToolNames ===

impl ToolNames {
    /// Maximum number of names that [`add`](Self::add) accepts. Chosen because each name adds about 50 series.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::ToolNames;
    ///
    /// assert_eq!(ToolNames::MAX, 256);
    /// ```
    pub const MAX: usize = 256;

    /// Maximum length of a name that [`add`](Self::add) accepts, in bytes. It is that of the MCP specification.
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

    /// Adds a name for the calls that start from now on. Returns `true` if it was added.
    ///
    /// Returns `false` if the name is known. A name beyond [`MAX`](Self::MAX) or [`MAX_LENGTH`](Self::MAX_LENGTH) is not added
    /// either, and its calls are `other`.
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

    /// Records that a call has started. The name of its tool becomes a label of the call if it is already known.
    pub(super) fn on_started(&self, call: &CallInfo) {
        let _names = self.0.names.read().unwrap_or_else(PoisonError::into_inner);
        let number = u64::from(call.id());
        self.0.last_started.fetch_max(number, Ordering::Relaxed);
    }

    /// Returns the name of the call's tool, or `None` if it was not known when the call started.
    pub(super) fn label_of(&self, call: &CallInfo, tool: &str) -> Option<SharedString> {
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
