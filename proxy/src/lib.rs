//! The library behind the `mcp-cancel-proxy` program.
//!
//! The proxy puts [`mcp_cancel_on_disconnect`] in front of any MCP server.
//!
//! A request takes this path to the server, and its response takes the same path back:
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
//! | [`event_store`] | stores a server's events for clients that resume |
//! | [`message`], [`headers`] | read whatever the proxy needs in order to route a message or a request |
//! | [`server`] | passes requests on to the configured server, an upstream or a command |
//! | [`admin`] | serves the operator pages (health, metrics, calls) on another address |
//! | [`drain`] | shuts the program down in bounded time |
//! | [`log`] | writes log lines |
//! | [`refusal`] | builds the proxy's own responses |
//! | [`subcommand`] | runs the sub-commands: health check, manual page, completions |
//! | [`lock`] | locks a mutex, even after a panic |
//! | [`http_service`] | defines the trait that the proxy's services implement |
//!
//! [`Proxy`] puts them together.

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
