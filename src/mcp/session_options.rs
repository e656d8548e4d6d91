//! Session manager options that control when sessions are closed.

use std::time::Duration;

use super::session_manager::CancellableSessionManager;

impl<M> CancellableSessionManager<M> {
    /// Closes sessions that have been idle for `timeout`, at least 100 ms.
    ///
    /// This applies to sessions created afterwards. A closed session's client receives 404 for its next request. A session is
    /// idle while none of the following is using it:
    ///
    /// - a request, even while its body is incomplete or a middleware inside the layer is holding it;
    /// - an open stream, including a standalone one;
    /// - a call that has not ended, even a detached one;
    /// - an answer that is retained for a disconnected client.
    ///
    /// Messages from the server do not count. Without a layer, the session manager does not know about detached calls, or about
    /// requests that have not reached it yet.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    ///
    /// let mut manager = LocalSessionManager::default();
    /// manager.session_config.keep_alive = None; // else both timers run
    /// let sessions = CancellableSessionManager::new(manager).idle_timeout(Duration::from_secs(900));
    /// assert!(format!("{sessions:?}").contains("idle_timeout: Some(900s)"));
    /// ```
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeouts.idle = Some(timeout);
        self
    }

    /// Closes sessions whose client has been disconnected for `timeout`, at least 100 ms.
    ///
    /// Off by default. This applies to sessions created afterwards. Many clients never end their sessions, and this option closes
    /// those before the [`idle_timeout`](Self::idle_timeout) does. A client counts as disconnected from the time it disconnects
    /// from its last stream, whether standalone or for a call, until its next request. The timeout starts after the last use of
    /// the session, and so after the grace periods of its calls.
    ///
    /// SDKs reconnect within seconds, but give up on a standalone stream after an outage of several seconds. From then on they
    /// only send requests, so the timeout must be longer than a client's pauses. A client that sends a request later than that
    /// receives 404, and the TypeScript and Python SDKs do not open a new session on their own.
    ///
    /// # Edge cases
    ///
    /// - Every stream counts, including those for untracked calls and those without a layer. If a client disconnects from an
    ///   untracked call before the answer, this timeout never closes its session, because the call might still be running.
    /// - A client does not count as disconnected if the server ended its stream, because the server might have asked it to wait.
    /// - On a dead network, a disconnect is detected late. It is then treated as later than any requests that the client has sent
    ///   over other connections in the meantime.
    /// - With an event store, or with a session manager other than rmcp's own, an event id does not show which stream it belongs
    ///   to. A resumed stream then counts as standalone if its last event id is among the 64 most recent ones of the session's
    ///   standalone streams. Otherwise it counts as an untracked call's stream.
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

    /// Keeps idle sessions open until their clients or the inner manager close them.
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
    /// Off by default, so an open standalone stream keeps its session open, even if the client no longer uses the session or a
    /// proxy is holding on to the connection of a client that has disconnected. This option applies to sessions created
    /// afterwards. If the client of such a session only listens, the session is closed after the
    /// [`idle_timeout`](Self::idle_timeout) and its stream ends, so that timeout must be longer than a client's pauses. After a
    /// 404, the TypeScript and Python SDKs do not open a new session on their own.
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
