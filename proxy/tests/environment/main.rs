//! The program in an environment that fails, as a table: a row is a fault, a column is the phase in which it happens.
//!
//! Every cell starts the real binary, and brings it into its phase. It checks what the client and the server receive, what is
//! logged, and which processes and descriptors remain.
//!
//! | module | table |
//! |---|---|
//! | `output` | standard output and standard error that cannot be written |
//! | `processes` | processes of sessions that exit, fork, flood and the like |
//! | `upstreams` | upstreams that fail |
//! | `resources` | descriptors and memory that are used up |
//! | `signals` | signals |
//! | `started` | the program in a phase, and the checks of it |
//! | `table` | which cells run |
//!
//! No row changes the clock: the program uses the monotonic clock only, and the wall clock only for the times of log lines.
//!
//! `cargo test` runs one cell of each row. `MCP_PROXY_TEST_CELLS=all` runs them all.

#![cfg(target_os = "linux")]
#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod output;
mod processes;
mod resources;
mod signals;
mod started;
#[allow(dead_code, unused_imports, reason = "the other tests need more of it")]
#[path = "../it/support/mod.rs"]
mod support;
mod table;
mod upstreams;
