//! The transport between a [`CancellableSessionManager`](crate::CancellableSessionManager) and the task that serves a session.
//!
//! Sessions are served on a [`CancellableTransport`], which suppresses any messages that a call still sends after it has been cancelled.
//! Its errors are [`TransportError`]s. rmcp's `StreamableHttpService` uses both on its own, so you only need to name these types if you
//! write your own server.

pub use crate::mcp::{CancellableTransport, TransportError};
