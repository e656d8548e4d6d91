//! A server on stdin and stdout, as a Streamable HTTP service. Each session has a process.
//!
//! 1. **Messages are not rewritten.** A message passes as it was written, in both directions, with these exceptions. White
//!    space around it and a server's byte order mark are removed, and line breaks between its tokens become spaces. A server's
//!    batch is split. The layer's cancel gets the id as the client wrote it.
//! 2. **No process is left.** The end of a session closes the stdin of its process, and then signals its group (`process`).
//! 3. **Routing.** `routing` finds the call of each line. A line that may belong to several open calls is sent on none
//!    of their streams.
//! 4. **Bounded.** Limits exist for queued messages (1,024 messages, 8 MiB a session), a line (16 MiB), log lines, calls and
//!    sessions. The event store bounds what clients have not read.
//! 5. **Cancelled is not stopped.** The process receives a cancel, which its tool may ignore. Only [`Options::kill_after`]
//!    guarantees that the tool stops.
//! 6. **A disconnect has no effect here.** The call runs without its client, and its answer is kept in the event store. The
//!    layer around this service decides whether the call is an orphan, and then POSTs the cancel.

mod begin;
mod end_counts;
mod input;
pub mod lines;
mod make_room;
pub(crate) mod process;
mod restart_backoff;
pub mod routing;
mod service;
mod session;
mod session_info;
mod stderr_log;
mod stop;
mod task;

use std::time::Duration;

pub use self::{
    process::Program,
    service::{Stats, Stdio},
    session_info::SessionInfo,
};

/// Options of [`Stdio`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The program that is started for each session.
    pub program: Program,
    /// Maximum number of processes: 256.
    pub max_sessions: usize,
    /// Time without a request and a stream after which a session may end to make room: 10 s.
    ///
    /// This applies at the session limit. It is longer than the 3 s after which SDK clients reconnect.
    pub make_room_after: Duration,
    /// How long a session may be unused: 30 minutes. `None` for no limit.
    pub session_timeout: Option<Duration>,
    /// How long a session may be unused after its client has disconnected. `None` for no such limit, which is the default.
    ///
    /// A client has disconnected if it had a standalone stream at its last request or since, and has none now. SDK clients do not
    /// reopen that stream after an outage of some seconds, and then only send requests. So this must be longer than the pauses of
    /// clients.
    pub lost_timeout: Option<Duration>,
    /// How long a cancelled call may stay unanswered. `None` for no limit, which is the default.
    ///
    /// After that time the process of its session is killed, and with it all other calls of the session. Many servers
    /// never answer a cancelled call, even if they have stopped it. So this is for servers that do answer, or that nothing
    /// else stops.
    pub kill_after: Option<Duration>,
}

// === impl Options ===

impl Options {
    /// Creates the default options for a program.
    #[must_use]
    pub fn new(program: Program) -> Self {
        Self {
            program,
            max_sessions: 256,
            make_room_after: Duration::from_secs(10),
            session_timeout: Some(Duration::from_secs(30 * 60)),
            lost_timeout: None,
            kill_after: None,
        }
    }
}
