//! What the benches share.
//!
//! Each bench is a program in `src/bin` that measures one thing in all set-ups of [`setup`], in one run, prints its
//! table, and leaves it as a [`report::Section`] for the report.

pub mod callgrind;
pub mod case;
pub mod client;
pub mod dhat;
pub mod gate;
pub mod growth;
pub mod guard;
pub mod report;
pub mod setup;
pub mod slow;
pub mod sockets;
pub mod tools;
pub mod work;

/// Whether the small version was asked for, of seconds: `--quick`.
pub fn is_quick() -> bool {
    std::env::args().any(|argument| argument == "--quick")
}

/// Why a bench cannot go on.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
