//! Real processes behind the service: how calls end, and that no process is left behind.
#![cfg(unix)]
#![allow(
    clippy::restriction,
    reason = "a failed expectation ends the test; clippy only spares functions marked #[test]"
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
