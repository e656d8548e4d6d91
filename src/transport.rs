//! The transport between a [`CancellableSessionManager`](crate::CancellableSessionManager) and the task that serves a session.
//!
//! Sessions are served on a [`CancellableTransport`], which keeps back what a cancelled call still sends. Its error is a
//! [`TransportError`]. rmcp's `StreamableHttpService` handles them itself; a server of your own names the types:
//!
//! ```
//! use mcp_cancel_on_disconnect::{CancellableSessionManager, transport::CancellableTransport};
//! use rmcp::{
//!     RoleServer,
//!     transport::{Transport, streamable_http_server::{SessionManager, session::SessionId}},
//! };
//!
//! /// Opens a session.
//! async fn open<M: SessionManager>(
//!     sessions: &CancellableSessionManager<M>,
//! ) -> Result<(SessionId, CancellableTransport<M::Transport>), M::Error> {
//!     sessions.create_session().await
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let sessions = CancellableSessionManager::default();
//! let (id, mut transport) = open(&sessions).await.unwrap();
//! assert!(sessions.has_session(&id).await.unwrap());
//! transport.close().await.unwrap();
//! # }
//! ```

pub use crate::mcp::{CancellableTransport, TransportError};
