//! What all benches share: set-ups, clients, counting and the report.
//!
//! Each bench is a program in `src/bin`. It measures one thing in several of the [`setup`]s in a single run, prints its
//! tables, and stores each of them as a [`report::Section`]. The text for each section is in `sections`. The programs
//! `gate` and `report` are not benches: one enforces limits, the other assembles the sections.

use std::{env, fmt::Display};

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

pub mod attribution;
pub mod case;
pub mod child;
pub mod client;
pub mod common_layers;
pub mod dhat;
pub mod gate;
pub mod growth;
pub mod guard;
pub mod locks;
pub mod machine;
pub mod pairs;
pub mod report;
pub mod setup;
pub mod sockets;
pub mod stats;
pub mod tools;
pub mod valgrind;
pub mod work;

/// What most of the programs need.
pub mod prelude {
    pub use crate::{
        case::{Candidate, Case, Load, Workload},
        cells,
        client::{Client, Close, Stream, Transport},
        is_quick, machine,
        pairs::{alternate, ratios},
        paused_runtime,
        report::{AtLeast, AtMost, Section, Target},
        role, runtime,
        setup::{Mode, Setup},
        sockets::{
            ledger::{CallTimes, Group, Ledger, SelectStamp},
            serve::{record_drops, serve},
            tools::{Tools, done},
        },
        stats::{Dice, Sample},
        valgrind::{Allocator, Count, Counts},
        workers,
    };
    pub use anyhow::{Context, Result, bail, ensure};
    pub use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
    pub use serde_json::json;
    pub use std::time::Duration;
    pub use strum::{Display, EnumIter, IntoEnumIterator};
}

/// Creates a row of a table.
#[macro_export]
macro_rules! cells {
    ($($cell:expr),* $(,)?) => { vec![$($cell.to_string()),*] };
}

/// Returns `true` if `--quick` was passed, which asks for a run of a few seconds.
pub fn is_quick() -> bool {
    env::args().any(|argument| argument == "--quick")
}

/// Returns the command line without `--quick`. It selects the part of a bench that this process runs, see [`child`].
pub fn role() -> String {
    let arguments = env::args().skip(1);
    Vec::from_iter(arguments.filter(|word| word != "--quick")).join(" ")
}

/// Returns the item that displays as `words`.
pub fn find_named<T: Display>(mut items: impl Iterator<Item = T>, words: &str) -> Result<T> {
    let found = items.find(|item| item.to_string() == words);
    found.with_context(|| format!("nothing is named {words:?}"))
}

/// Creates a runtime on the current thread.
pub fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Creates a runtime on the current thread with a paused clock.
///
/// The clock only advances while the runtime is idle.
pub fn paused_runtime() -> std::io::Result<Runtime> {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true).build()
}

/// Number of threads used by [`workers`].
pub const WORKERS: usize = 2;

/// Creates a runtime for a server on real sockets.
pub fn workers() -> std::io::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(WORKERS).enable_all().build()
}
