//! Events of sessions.

/// Something that happened to a session, as
/// [`CancellableSessionManager::on_session`](crate::CancellableSessionManager::on_session) tells it.
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
///         let _sent = sender.send(*restored);
///     }
/// });
/// let (_id, _transport) = sessions.create_session().await.unwrap();
/// assert_eq!(opened.recv(), Ok(false), "it is a new one");
/// # }
/// ```
///
/// `Debug` shows the session id, and a client that knows it can speak for the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent<'a> {
    /// A session is there, but no message of it has been answered yet.
    #[non_exhaustive]
    Opened {
        /// Its id.
        session: &'a str,
        /// It goes on here under an id that was given out before, be it by this server or by another.
        restored: bool,
    },
    /// A session has ended: its client or the server asked for it, it was idle for too long, or another was restored under its
    /// id.
    #[non_exhaustive]
    Closed {
        /// Its id.
        session: &'a str,
    },
}
