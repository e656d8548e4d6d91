//! Session events.

use std::fmt;

/// Something that has happened to a session.
///
/// It is passed to the listeners added with [`CancellableSessionManager::on_session`](crate::CancellableSessionManager::on_session).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::sync::mpsc;
/// use mcp_cancel_on_disconnect::{CancellableSessionManager, observe::SessionEvent};
/// use rmcp::transport::streamable_http_server::SessionManager;
///
/// let (sender, opened) = mpsc::channel();
/// let sessions = CancellableSessionManager::default().on_session(move |event| {
///     if let SessionEvent::Opened { restored, .. } = event {
///         let _ = sender.send(*restored);
///     }
/// });
/// let (_id, _transport) = sessions.create_session().await.unwrap();
/// assert_eq!(opened.recv(), Ok(false), "the session is new");
/// # }
/// ```
///
/// `Debug` shows the session id, which a client can use to act for the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent<'a> {
    /// A session has been opened. None of its messages have been answered yet.
    #[non_exhaustive]
    Opened {
        /// The session's id.
        session: &'a str,
        /// Whether the session was restored, under an id issued earlier by a server.
        restored: bool,
    },
    /// A session has been closed (see [`SessionEnd`]).
    #[non_exhaustive]
    Closed {
        /// The session's id.
        session: &'a str,
        /// Why it was closed.
        reason: SessionEnd,
    },
}

/// Why a session was closed.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::sync::mpsc;
/// use mcp_cancel_on_disconnect::{
///     CancellableSessionManager,
///     observe::{SessionEnd, SessionEvent},
/// };
/// use rmcp::transport::streamable_http_server::SessionManager;
///
/// let (sender, ends) = mpsc::channel();
/// let sessions = CancellableSessionManager::default().on_session(move |event| {
///     if let SessionEvent::Closed { reason, .. } = event {
///         let _ = sender.send(*reason);
///     }
/// });
/// let (id, _transport) = sessions.create_session().await.unwrap();
/// sessions.close_session(&id).await.unwrap();
/// assert_eq!(ends.recv(), Ok(SessionEnd::Ended));
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SessionEnd {
    /// The client or the server ended it.
    Ended,
    /// It was idle for the [`idle_timeout`](crate::CancellableSessionManager::idle_timeout).
    Idle,
    /// The client disconnected, and the [`lost_timeout`](crate::CancellableSessionManager::lost_timeout) expired.
    Lost,
    /// Another session was created or restored under the same id.
    Replaced,
}

/// Formats the reason as a label, such as `idle`.
impl fmt::Display for SessionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ended => "ended",
            Self::Idle => "idle",
            Self::Lost => "lost",
            Self::Replaced => "replaced",
        })
    }
}
