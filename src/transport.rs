//! The transport between a [`CancellableSessionManager`](crate::CancellableSessionManager) and the task that serves a session.
//!
//! Sessions are served on a [`CancellableTransport`], which keeps back what a cancelled call still sends. Its error is a
//! [`TransportError`]. rmcp's `StreamableHttpService` handles them itself; a server of your own names the types.

pub use crate::mcp::{CancellableTransport, TransportError};
