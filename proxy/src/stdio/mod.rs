//! Serves a stdio MCP server over HTTP, with one process per session.
//!
//! 1. **Messages are not rewritten.** In both directions, a message is passed through as it was written, with a few exceptions.
//!    White space around it is removed, as is a byte order mark from a server. Line breaks between its tokens become spaces. A
//!    server's batch is split, and the layer's cancellation is given the id as the client wrote it.
//! 2. **No process is left behind.** When a session ends, its process's stdin is closed, and then the process group is signalled
//!    (`process`).
//! 3. **Routing.** `routing` finds the call for each line from the server. A line that might belong to any of several open calls
//!    is not sent on their streams.
//! 4. **Bounded.** There are limits for queued messages (1,024 messages and 8 MiB per session), lines (16 MiB), log lines,
//!    calls and sessions. The event store limits the events that clients have not read yet.
//! 5. **Cancelled does not mean stopped.** The process receives a cancellation, but its tool may ignore it. Only
//!    [`Options::kill_after`] guarantees that the tool stops.
//! 6. **A disconnect has no effect at this level.** The call keeps running without its client, and its answer is sent to the event
//!    store. The layer around this service decides whether the call is an orphan, and if so, POSTs the cancellation.

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
    /// The program to start for each session.
    pub program: Program,
    /// Maximum number of processes, 256 by default.
    pub max_sessions: usize,
    /// How long a session must have been unused before it may be evicted to make room.
    ///
    /// A session is unused while it has no request and no stream. This applies when the session limit has been reached. The
    /// default of 10 s is longer than the 3 s after which SDK clients reconnect.
    pub make_room_after: Duration,
    /// How long a session may be unused, or `None` for no limit. The default is 30 minutes.
    pub session_timeout: Option<Duration>,
    /// How long a session may be unused after its client has disconnected.
    ///
    /// `None`, the default, means no separate limit. A client is considered disconnected if it had a standalone stream when its
    /// last request ended, or later, but has none now. After an outage of a few seconds, SDK clients do not reopen that stream
    /// and only send requests, so this must be longer than the pauses between their requests.
    pub lost_timeout: Option<Duration>,
    /// How long a cancelled call may stay unanswered. `None`, the default, means no limit.
    ///
    /// After that time, the session's process is killed, which also ends all of the session's other calls. Many servers never
    /// answer a cancelled call, even if they have stopped working on it. So only use this for servers that do answer, or that
    /// nothing else can stop.
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
