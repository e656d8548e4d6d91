//! The parts of the program `mcp-cancel-proxy`, which puts [`mcp_cancel_on_disconnect`] in front of any MCP server.
//!
//! A request takes this way, and its response the way back:
//!
//! ```text
//! client ─▶ front ─▶ CancelOnDisconnectLayer ─▶ hub ─▶ forward ─▶ the server
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | what the program is told, by flags, the environment and a file |
//! | [`front`] | takes connections, and refuses what is none of the server's business |
//! | [`hub`] | keeps the events of calls for clients that come back |
//! | [`forward`] | hands requests on to a server that speaks HTTP |
//! | [`admin`] | shows health, metrics and calls, on another address |
//! | [`drain`] | ends in bounded time |
//! | [`log`] | what is logged, and how |
//! | [`message`] | reads a JSON-RPC message as far as the proxy must |
//! | [`refusal`] | the answers that are the proxy's own |
//! | [`stage`] | what all these services have in common |
//!
//! [`Proxy`] puts them together.

pub mod admin;
pub mod config;
pub mod drain;
pub mod forward;
pub mod front;
pub mod hub;
pub mod log;
pub mod message;
mod proxy;
pub mod refusal;
pub mod stage;

pub use self::proxy::{Proxy, StartError};
