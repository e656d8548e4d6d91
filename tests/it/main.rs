//! Integration tests: real sockets, real rmcp servers.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod abandoned;
mod abort;
mod admin;
mod asked;
mod attacks;
mod auto;
mod bad_bodies;
mod batches;
mod call_timeout;
mod calls;
mod contract;
mod cores;
mod crowd;
mod cycles;
mod drain;
mod ends;
mod foreign;
mod forwarding;
mod gated;
mod grace;
mod handed_over;
mod hang_up;
mod isolation;
mod kept;
mod late;
mod limits;
mod log;
mod middleware;
mod observe;
mod paths;
mod polling;
mod probed;
mod read_on;
mod reasons;
mod replayed;
mod resume;
mod sessions;
mod setup;
#[cfg(unix)]
mod shutdown;
mod silence;
#[cfg(all(feature = "axum", feature = "socket"))]
mod socket;
mod stack;
mod starved;
mod steps;
mod stored;
mod streams;
mod support;
mod transparency;
mod two_streams;
mod unread;
mod work;
