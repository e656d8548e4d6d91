//! What do all of these share? A witness, a server, and clients that hang up on purpose.
//!
//! | module | job |
//! |---|---|
//! | [`witness`] | what happened to every tool handler, keyed by label, awaited instead of slept for |
//! | [`server`] | an rmcp server whose tools write to the witness, and the mode it is served in |
//! | [`serve`] | an `axum::serve` task on a free port |
//! | [`request`] | a request as plain data, for every client below |
//! | [`client`] | HTTP/1.1 by hand: half-sent bodies, chunks, FIN, RST, half-close |
//! | [`h2`] | HTTP/2 streams of one connection, each of which can be reset alone |
//! | [`mcp`] | the MCP messages and headers on top of a request |
//! | [`body`], [`sse`] | the readers below the clients: transfer coding and server-sent events |
//! | [`setup`] | a server with the layer in place, and everything a test may watch of it |
//! | [`stack`], [`foreign`] | other servers behind the layer |
//! | [`log`] | the layer's events as data |
//! | [`limit`] | how long a test waits before it says what it waited for |
//!
//! Nothing here knows the crate under test: a test hands in an `axum::Router`, layered or not, and a
//! session manager, wrapped or not.
//!
//! ```ignore
//! let witness = Witness::new();
//! let service = Tools::new(&witness).service(Mode::Session, Arc::new(LocalSessionManager::default()));
//! let served = serve(router(service)).await;
//! let mcp = Mcp::session(served.addr, PATH).await;
//! let call = mcp.call(1, "hold", json!({ "label": "a" })).await;
//! witness.started("a").await;
//! call.fin();
//! assert!(witness.ended("a").await.is_cancelled());
//! ```

#![allow(
    dead_code,
    unused_imports,
    reason = "a toolbox: not every test run (features, filters) needs every tool"
)]
#![allow(
    unreachable_pub,
    reason = "nothing of a test binary is reachable; `pub` means: for the tests"
)]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a broken expectation of a test ends the test; clippy only spares functions marked #[test]"
)]

pub mod body;
pub mod client;
pub mod foreign;
pub mod h2;
pub mod limit;
pub mod log;
pub mod mcp;
pub mod request;
pub mod serve;
pub mod server;
pub mod setup;
pub mod sse;
pub mod stack;
pub mod witness;

pub use self::client::{Connection, Head, Reply};
pub use self::h2::{H2, H2Stream};
pub use self::limit::within;
pub use self::mcp::Mcp;
pub use self::request::Request;
pub use self::serve::{Served, serve, serve_on};
pub use self::server::{Mode, PATH, Tools, router};
pub use self::sse::{SseEvent, SseItem};
pub use self::witness::{End, Life, Running, Witness};
