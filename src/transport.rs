//! The transport between a [`CancellableSessionManager`](crate::CancellableSessionManager) and the task that serves a session.
//!
//! Sessions are served on a [`CancellableTransport`], which suppresses the messages that a cancelled call still sends. Its error is a
//! [`TransportError`]. rmcp's `StreamableHttpService` uses both on its own, so you only need to name these types in a server of your
//! own.

pub use crate::mcp::{CancellableTransport, TransportError};
