//! The options of a session manager that decide when it closes sessions.

use std::time::Duration;

use super::session_manager::CancellableSessionManager;

impl<M> CancellableSessionManager<M> {
    /// Closes sessions that were idle for `timeout`, at least 100 ms. Applies to sessions created from now on.
    ///
    /// The next request of their clients receives 404. A session is idle while nothing in this list uses it:
    ///
    /// - a request, even while its body is incomplete or a middleware inside the layer has it;
    /// - an open stream, including a standalone one;
    /// - a call that has not ended, even a detached one;
    /// - an answer that is retained for a client that is disconnected.
    ///
    /// Messages of the server do not count. Without a layer, the session manager does not know of detached calls, nor of requests that
    /// it has not received yet.
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
    /// Off by default. Applies to sessions created from now on. Many clients never end their sessions, and this option closes them before
    /// the [`idle_timeout`](Self::idle_timeout). A client counts as disconnected once it disconnects from its last stream, standalone or
    /// of a call, until its next request. The timeout starts after the last use of the session, and so after the graces of its calls.
    ///
    /// SDKs reconnect within seconds, but give up a standalone stream after an outage of some seconds. From then on they only send
    /// requests. So the timeout must be longer than the pauses of clients. A client that sends a request later receives 404, and the
    /// TypeScript and Python SDKs do not open a new session by themselves.
    ///
    /// # Edge cases
    ///
    /// - Every stream counts, including those of untracked calls and those without a layer. If a client disconnects from an untracked
    ///   call before the answer, its session is never closed by this timeout, because the call may still run.
    /// - A client whose stream the server has ended does not count as disconnected, because the server may have asked it to wait.
    /// - On a dead network, a disconnect is detected late. It then counts as later than the requests that the client has sent in
    ///   the meantime over other connections.
    /// - With an event store, or a session manager other than rmcp's own, event ids do not show their stream. A resumed stream then counts
    ///   as standalone if its last event id is one of the latest 64 of the session's standalone streams. Otherwise it counts as the
    ///   stream of an untracked call.
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

    /// Closes idle sessions even if a standalone stream is open. Applies to sessions created from now on.
    ///
    /// Off by default, so an open standalone stream keeps its session open. That is so even if the client no longer uses the session, or a
    /// proxy holds the connection of a client that has disconnected. With this option, a session whose client only listens is closed
    /// after the [`idle_timeout`](Self::idle_timeout), and its stream ends. That timeout must be longer than the pauses of clients.
    /// After a 404, the TypeScript and Python SDKs do not open a new session by themselves.
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
