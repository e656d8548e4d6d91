//! Session manager options that control when sessions are closed.

use std::time::Duration;

use super::session_manager::CancellableSessionManager;

impl<M> CancellableSessionManager<M> {
    /// Closes sessions that have been idle for `timeout` (at least 100 ms).
    ///
    /// Only affects sessions created afterwards. Once a session has been closed, its client's next request receives a 404. A
    /// session is idle while it has none of the following:
    ///
    /// - a request, even if its body is still incomplete or a middleware inside the layer is holding it back;
    /// - an open stream, including a standalone one;
    /// - an in-flight call, even a detached one;
    /// - an answer retained for a disconnected client.
    ///
    /// Messages from the server don't keep a session open. Without a layer, the session manager knows about neither detached
    /// calls nor requests that have yet to reach it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    ///
    /// let mut manager = LocalSessionManager::default();
    /// manager.session_config.keep_alive = None; // otherwise both timers run
    /// let sessions = CancellableSessionManager::new(manager).idle_timeout(Duration::from_secs(900));
    /// assert!(format!("{sessions:?}").contains("idle_timeout: Some(900s)"));
    /// ```
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeouts.idle = Some(timeout);
        self
    }

    /// Closes sessions whose client has been disconnected for `timeout` (at least 100 ms).
    ///
    /// Off by default, and only affects sessions created afterwards. Many clients never end their sessions; this option closes
    /// those sessions earlier than the [`idle_timeout`](Self::idle_timeout) would. A client is considered disconnected from the
    /// moment it drops its last stream, whether standalone or for a call, until its next request. The timeout only starts once
    /// nothing is using the session any more, and therefore not before its calls' grace periods have ended.
    ///
    /// SDKs reconnect within seconds, but give up on a standalone stream after an outage of several seconds. After that, they
    /// only send requests, so the timeout must be longer than the pauses between a client's requests. After a longer pause, the
    /// client receives a 404, and the TypeScript and Python SDKs do not open a new session on their own.
    ///
    /// # Edge cases
    ///
    /// - All streams are taken into account, including those of untracked calls, and even without a layer. If a client
    ///   disconnects from an untracked call before it is answered, this timeout never closes its session, because the call might
    ///   still be running.
    /// - If the server ended the stream, the client is not considered disconnected, because the server might have asked it to
    ///   wait.
    /// - On a dead network, a disconnect is detected late, and is then treated as if it had happened after any requests the
    ///   client has sent over other connections in the meantime.
    /// - With an event store, or with a session manager other than rmcp's own, an event id does not show which stream it belongs
    ///   to. A resumed stream is then treated as standalone if the client's last event id is among the 64 most recent ids sent on
    ///   the session's standalone streams. Otherwise it is treated as an untracked call's stream.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// let sessions = CancellableSessionManager::default().lost_timeout(Duration::from_secs(120));
    /// assert!(format!("{sessions:?}").contains("lost_timeout: Some(120s)"));
    /// ```
    pub fn lost_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeouts.lost = Some(timeout);
        self
    }

    /// Keeps idle sessions open until their client or the inner manager closes them.
    ///
    /// ```
    /// # use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// let sessions = CancellableSessionManager::default().no_idle_timeout();
    /// assert!(format!("{sessions:?}").contains("idle_timeout: None"));
    /// ```
    pub fn no_idle_timeout(mut self) -> Self {
        self.idle_timeouts.idle = None;
        self
    }

    /// Closes idle sessions even if a standalone stream is open.
    ///
    /// Off by default, so an open standalone stream keeps its session open, even if its client no longer uses the session, or has
    /// disconnected from a proxy that still has the connection open. This option only affects sessions created afterwards. With
    /// it, even a session whose client is listening is closed after the [`idle_timeout`](Self::idle_timeout), which ends the
    /// stream. This timeout must therefore be longer than the pauses between a client's requests. After a 404, the TypeScript and
    /// Python SDKs do not open a new session on their own.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// let sessions = CancellableSessionManager::default()
    ///     .idle_timeout(Duration::from_secs(24 * 3600))
    ///     .ignore_standalone_streams();
    /// assert!(format!("{sessions:?}").contains("ignore_standalone_streams: true"));
    /// ```
    pub fn ignore_standalone_streams(mut self) -> Self {
        self.idle_timeouts.ignore_standalone_streams = true;
        self
    }
}
