//! Shared by the server under test, the load and the referee.
//!
//! The server's handlers and the clients write down facts, each into a file of its own ([`fact`]); afterwards the
//! [`referee`] decides from these files alone whether every call ended as it should.

pub mod clock;
pub mod fact;
pub mod job;
pub mod pulse;
pub mod referee;
pub mod setup;
pub mod wire;
