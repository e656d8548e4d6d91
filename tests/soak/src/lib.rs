//! What the server under test, the load and the referee share.
//!
//! Handlers and clients record facts, each process in a file of its own ([`fact`]). Afterwards the [`referee`] decides
//! from these files alone whether every call ended as expected.

pub mod clock;
pub mod fact;
pub mod job;
pub mod pulse;
pub mod referee;
pub mod setup;
pub mod wire;
