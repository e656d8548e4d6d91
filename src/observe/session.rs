//! Events of sessions.

/// An event of a session, for the listeners of
/// [`CancellableSessionManager::on_session`](crate::CancellableSessionManager::on_session).
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
/// `Debug` shows the session id, with which a client can act for the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent<'a> {
    /// A session was opened. None of its messages has been answered yet.
    #[non_exhaustive]
    Opened {
        /// The id of the session.
        session: &'a str,
        /// `true` if the session was restored under an id that this server or another one issued before.
        restored: bool,
    },
    /// A session was closed: by its client, by the server, for being idle, or because another was restored under its id.
    #[non_exhaustive]
    Closed {
        /// The id of the session.
        session: &'a str,
    },
}
