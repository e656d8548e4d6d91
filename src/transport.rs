//! The transport between a [`CancellableSessionManager`](crate::CancellableSessionManager) and the task that serves a session.
//!
//! Sessions are served on a [`CancellableTransport`], which suppresses the messages that a cancelled call still sends. Its error
//! is a [`TransportError`]. rmcp's `StreamableHttpService` uses both on its own. Only a server of your own needs to name these types.

pub use crate::mcp::{CancellableTransport, TransportError};
