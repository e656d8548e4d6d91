//! Real processes behind the service: the outcomes of calls, and that no process is left.
#![cfg(unix)]
#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod answers;
mod client;
mod ends;
mod lines;
mod requests;
mod room;
mod server;
mod short;
mod slow;
