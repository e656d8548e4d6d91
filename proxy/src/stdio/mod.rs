//! A server that speaks stdio, as a service that speaks Streamable HTTP: a process for each session.
//!
//! 1. **Bytes.** A message passes as it was written, in both directions. Only line breaks between its tokens become spaces.
//! 2. **Nothing survives.** The end of a session closes the stdin of its process, and then signals its group (`process`).
//! 3. **Whose a line is** says `routing`; in doubt it is sent to no call's stream.
//! 4. **Bounded.** What waits to be written (1,024 messages, 8 MiB a session), a line (16 MiB), what is logged, the calls and
//!    the sessions. What waits to be read is the event store's.
//! 5. **Told, not stopped.** A cancel is passed to the process. Whether its tool stops is up to that; only
//!    [`Options::kill_after`] makes sure.
//! 6. **Hang-ups mean nothing here.** A call runs on without its client, and its answer is kept in the event store. The layer outside
//!    decides that it is abandoned, and POSTs the cancel.

mod begin;
mod input;
pub mod lines;
pub(crate) mod process;
mod restart_backoff;
pub mod routing;
mod service;
mod session;
mod stderr_log;
mod task;

use std::time::Duration;

pub use self::{
    process::Program,
    service::{Stats, Stdio},
};

/// What [`Stdio`] runs, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// What is started for each session.
    pub program: Program,
    /// How many processes there may be: 256.
    pub max_sessions: usize,
    /// How long a session may be unused: 30 minutes. `None`: for ever.
    pub session_timeout: Option<Duration>,
    /// How long after it was told to stop a call must have answered. If it has not, the process of its session is
    /// killed, with all that the session does. Many servers never answer a call that was cancelled, also if they stopped it:
    /// this is for those that do answer, or that nothing else stops. Off by default.
    pub kill_after: Option<Duration>,
}

// === impl Options ===

impl Options {
    /// The default ones for a program.
    #[must_use]
    pub fn new(program: Program) -> Self {
        Self {
            program,
            max_sessions: 256,
            session_timeout: Some(Duration::from_secs(30 * 60)),
            kill_after: None,
        }
    }
}
