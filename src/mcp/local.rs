//! Constructors that wrap rmcp's own session manager.

use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};

use super::session_manager::CancellableSessionManager;

// === impl CancellableSessionManager ===

impl CancellableSessionManager<LocalSessionManager> {
    /// Wraps rmcp's [`LocalSessionManager`], which keeps sessions in process memory.
    ///
    /// The `keep_alive` in `config`, 5 minutes by default, becomes the [`idle_timeout`](Self::idle_timeout), and rmcp's own timer is
    /// disabled. That timer would also close a session during a silent call, even though the client is still connected, and the
    /// call's answer would be lost.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::SessionConfig;
    ///
    /// let mut config = SessionConfig::default();
    /// config.keep_alive = Some(Duration::from_secs(3600)); // or `None`: never closed
    /// let sessions = CancellableSessionManager::local(config);
    /// assert_eq!(sessions.inner().session_config.keep_alive, None);
    /// ```
    pub fn local(config: SessionConfig) -> Self {
        let mut manager = LocalSessionManager::default();
        manager.session_config = config;
        Self::from_local(manager)
    }

    /// Wraps an already configured [`LocalSessionManager`], such as one with an event store.
    ///
    /// Like [`local`](Self::local), this turns the `keep_alive` into the [`idle_timeout`](Self::idle_timeout). This matters even more
    /// with an event store: clients then poll the store, which rmcp's own timer ignores.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    ///
    /// let mut manager = LocalSessionManager::default(); // `.with_event_store(…)`
    /// manager.session_config.keep_alive = Some(Duration::from_secs(3600));
    /// let sessions = CancellableSessionManager::from_local(manager);
    /// assert_eq!(sessions.inner().session_config.keep_alive, None);
    /// assert!(format!("{sessions:?}").contains("idle_timeout: Some(3600s)"));
    /// ```
    pub fn from_local(mut manager: LocalSessionManager) -> Self {
        let idle_timeout = manager.session_config.keep_alive.take();
        let mut local = Self::new(manager);
        local.idle_timeouts.idle = idle_timeout;
        local
    }
}

/// Keeps sessions in process memory, like [`local`](Self::local) with the default [`SessionConfig`].
///
/// ```
/// use mcp_cancel_on_disconnect::CancellableSessionManager;
///
/// let sessions = CancellableSessionManager::default();
/// assert!(format!("{sessions:?}").contains("idle_timeout: Some(300s)"));
/// ```
impl Default for CancellableSessionManager<LocalSessionManager> {
    fn default() -> Self {
        Self::local(SessionConfig::default())
    }
}
