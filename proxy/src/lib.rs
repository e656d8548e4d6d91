//! The parts of the program `mcp-cancel-proxy`, which puts [`mcp_cancel_on_disconnect`] in front of any MCP server.
//!
//! A request takes this way, and its response the way back:
//!
//! ```text
//! client ─▶ frontend ─▶ CancelOnDisconnectLayer ─▶ store ─▶ forward ─▶ a server that speaks HTTP
//!                                            └─▶ stdio ─────────────────▶ one that is started, with the store's streams
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | what the program is told, by flags, the environment and a file |
//! | [`frontend`] | takes connections, and refuses what is none of the server's business |
//! | [`forward`] | hands requests on to a server that speaks HTTP |
//! | [`stdio`] | starts servers that speak on stdin and stdout, and speaks HTTP for them |
//! | [`store`] | keeps what a server sent, for clients that resume |
//! | [`message`], [`head`] | read of a message and of a head what routes them |
//! | [`server`] | one of these, as it is configured |
//! | [`admin`] | shows health, metrics and calls, on another address |
//! | [`drain`] | ends in bounded time |
//! | [`log`] | what is logged, and how |
//! | [`refusal`] | the answers that are the proxy's own |
//! | [`demo`] | shows it all, with a server of its own |
//! | [`service`] | what all these services have in common |
//!
//! [`Proxy`] puts them together.

#[cfg(feature = "program")]
pub mod admin;
#[cfg(feature = "program")]
pub mod config;
#[cfg(feature = "program")]
pub mod demo;
#[cfg(feature = "program")]
mod descriptors;
#[cfg(feature = "program")]
pub mod drain;
pub mod event_store;
#[cfg(feature = "program")]
pub mod forward;
#[cfg(feature = "program")]
pub mod frontend;
pub mod headers;
pub mod http_service;
#[cfg(feature = "program")]
mod keep_running;
#[cfg(feature = "program")]
mod listing;
mod lock;
#[cfg(feature = "program")]
pub mod log;
pub mod message;
#[cfg(feature = "program")]
mod proxy;
pub mod refusal;
#[cfg(feature = "program")]
pub mod server;
pub mod stdio;

#[cfg(feature = "program")]
pub use self::proxy::{Proxy, StartError};
