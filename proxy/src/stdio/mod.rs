//! A server on stdin and stdout, as a Streamable HTTP service with one process per session.
//!
//! 1. **Messages are not rewritten.** A message is passed through as it was written, in both directions, with these exceptions:
//!    white space around it and a server's byte order mark are removed, line breaks between its tokens become spaces, a server's
//!    batch is split, and the layer's cancellation gets the id as the client wrote it.
//! 2. **No process is left behind.** When a session ends, its process's stdin is closed, and then its group is signalled
//!    (`process`).
//! 3. **Routing.** `routing` finds the call for each line. A line that could belong to several open calls is sent on none of
//!    their streams.
//! 4. **Bounded.** There are limits for queued messages (1,024 messages, 8 MiB per session), lines (16 MiB), log lines, calls and
//!    sessions. The event store bounds what clients have not read.
//! 5. **Cancelled is not stopped.** The process receives a cancellation, which its tool may ignore. Only [`Options::kill_after`]
//!    guarantees that the tool stops.
//! 6. **A disconnect has no effect at this level.** The call keeps running without its client, and its answer is kept in the
//!    event store. The layer around this service decides whether the call is an orphan, and if so, POSTs the cancellation.

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

/// Options for [`Stdio`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The program that is started for each session.
    pub program: Program,
    /// Maximum number of processes, 256 by default.
    pub max_sessions: usize,
    /// How long a session must have had no request and no stream before it may end to make room.
    ///
    /// This applies at the session limit. The default is 10 s, which is longer than the 3 s after which SDK clients reconnect.
    pub make_room_after: Duration,
    /// How long a session may be unused, 30 minutes by default, or `None` for no limit.
    pub session_timeout: Option<Duration>,
    /// How long a session may be unused after its client has disconnected.
    ///
    /// `None`, which is the default, means no such limit. A client counts as disconnected if it had a standalone stream at its last
    /// request or since, but has none now. SDK clients do not reopen that stream after an outage of some seconds, and only send
    /// requests from then on, so this must be longer than their pauses.
    pub lost_timeout: Option<Duration>,
    /// How long a cancelled call may stay unanswered. `None`, the default, means no limit.
    ///
    /// After that time, the process of the call's session is killed, and all the session's other calls with it. Many servers
    /// never answer a cancelled call, even if they have stopped it, so this is for servers that do answer, or that nothing else
    /// stops.
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
