//! The proxy that puts [`mcp_cancel_on_disconnect`] in front of an MCP server, as a library.
//!
//! A request takes this path, and its response takes the same path back:
//!
//! ```text
//! client ─▶ frontend ─▶ CancelOnDisconnectLayer ─▶ event_store ─▶ forward ─▶ a server that speaks HTTP
//!                                               └─▶ stdio ─────────────────▶ a command, with streams from the event store
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | reads options from flags, environment variables and a file |
//! | [`frontend`] | accepts connections and refuses requests that must not reach the server |
//! | [`forward`] | forwards requests to a server that speaks HTTP |
//! | [`stdio`] | starts servers that use stdin and stdout, and serves them over HTTP |
//! | [`event_store`] | keeps a server's events, for clients that resume |
//! | [`message`], [`headers`] | read the parts of a message or a request that determine its route |
//! | [`server`] | passes requests on to the configured server, an upstream or a command |
//! | [`admin`] | serves health, metrics and calls on another address |
//! | [`drain`] | shuts down in bounded time |
//! | [`log`] | writes log lines |
//! | [`refusal`] | builds the proxy's own responses |
//! | [`subcommand`] | runs sub-commands: health, manual page, completions |
//! | [`lock`] | locks a mutex, even after a panic |
//! | [`http_service`] | defines the trait that the services behind the layer implement |
//!
//! [`Proxy`] assembles them.

#[cfg(feature = "program")]
pub mod admin;
#[cfg(feature = "program")]
pub mod config;
#[cfg(feature = "program")]
mod cors;
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
pub mod lock;
#[cfg(feature = "program")]
pub mod log;
pub mod message;
#[cfg_attr(
    not(feature = "program"),
    expect(dead_code, reason = "only the program reads origins")
)]
mod origin;
#[cfg(feature = "program")]
mod proxy;
#[cfg(feature = "program")]
mod public_url;
pub mod refusal;
#[cfg(feature = "program")]
pub mod server;
pub mod stdio;
#[cfg(feature = "program")]
pub mod subcommand;

#[cfg(feature = "otel")]
mod traces;

#[cfg(feature = "program")]
pub use self::proxy::{Proxy, StartError};
