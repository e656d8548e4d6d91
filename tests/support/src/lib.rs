//! Clients, a server and random choices, shared by the tests of all crates.
//!
//! The clients disconnect on purpose, while the server records what happens to its handlers.
//!
//! | module | contents |
//! |---|---|
//! | [`witness`] | what has happened to each tool handler, by label, which tests can await without sleeping |
//! | [`server`] | an rmcp server whose tools write to the witness, and its modes |
//! | [`sessions`] | helpers for session managers that override a few of rmcp's methods |
//! | [`serve`] | an `axum::serve` task on a free port |
//! | [`request`] | a request as plain data, for every client below |
//! | [`client`] | hand-written HTTP/1.1: half-sent bodies, chunks, FIN, RST, half-close |
//! | [`h2`] | HTTP/2 streams that share a connection but can be reset one by one |
//! | [`mcp`] | the MCP messages and headers on top of a request |
//! | [`head`], [`body`], [`sse`] | the parsers used by the clients: heads, transfer coding and server-sent events |
//! | [`limit`] | how long a test waits before it reports what it waited for |
//! | [`dice`] | reproducible random choices |
//!
//! Nothing in this crate depends on the crate under test. Tests pass an `axum::Router`, with or without layers, and a
//! session manager, wrapped or not. A failed expectation panics and so ends the test.
//!
//! Without the `sockets` feature there are only the parsers and the dice, and no dependency that affects a server.
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

pub mod body;
#[cfg(feature = "sockets")]
pub mod client;
pub mod dice;
#[cfg(feature = "sockets")]
pub mod h2;
pub mod head;
#[cfg(feature = "sockets")]
pub mod limit;
#[cfg(feature = "sockets")]
pub mod mcp;
#[cfg(feature = "sockets")]
pub mod request;
#[cfg(feature = "sockets")]
pub mod serve;
#[cfg(feature = "sockets")]
pub mod server;
#[cfg(feature = "sockets")]
pub mod sessions;
pub mod sse;
#[cfg(feature = "sockets")]
pub mod witness;

pub use self::dice::Dice;
pub use self::sse::{SseEvent, SseItem};
#[cfg(feature = "sockets")]
pub use self::{
    client::{Connection, Head, Reply},
    h2::{H2, H2Stream},
    limit::within,
    mcp::{Mcp, handshake},
    request::Request,
    serve::{Served, serve, serve_on},
    server::{Mode, PATH, Tools, router},
    witness::{End, HandlerRecord, Running, Witness},
};
