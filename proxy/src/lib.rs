//! The parts of the program `mcp-cancel-proxy`.

pub mod hub;
pub mod message;
#[cfg(unix)]
pub mod stdio;
