//! The program in a failing environment, as a table with a row per fault and a column per phase.
//!
//! Every cell starts the real binary and gets it into its phase, and then checks what the client and the server receive, what is logged,
//! and which processes and descriptors are left.
//!
//! | module | table |
//! |---|---|
//! | `output` | standard output and standard error that cannot be written to |
//! | `processes` | session processes that exit, fork, flood and the like |
//! | `upstreams` | upstreams that fail |
//! | `resources` | running out of descriptors and memory |
//! | `signals` | signals |
//! | `started` | the program in a phase, and checks on it |
//! | `table` | which cells run |
//!
//! No row changes the clock, because the program uses the wall clock only for the times on its log lines, and otherwise the monotonic
//! clock.
//!
//! `cargo test` runs one cell from each row, and `MCP_PROXY_TEST_CELLS=all` runs them all.

#![cfg(target_os = "linux")]
#![allow(
    clippy::restriction,
    reason = "a failed expectation ends the test; clippy only spares functions marked #[test]"
)]

mod output;
mod processes;
mod resources;
mod signals;
mod started;
#[allow(dead_code, unused_imports, reason = "other tests use the rest")]
#[path = "../it/support/mod.rs"]
mod support;
mod table;
mod upstreams;
