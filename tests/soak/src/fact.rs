//! Facts recorded by handlers and clients: one JSON object per line, one write per line.
//!
//! A fact is something that its writer did or observed. A client records an action both before and after it, so the
//! action happened at some time in between.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::clock::{Micros, now};

/// A fact and its time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    pub at: Micros,
    #[serde(flatten)]
    pub fact: Fact,
}

/// A call's name: its [`Job`](crate::job::Job).
pub type Call = Arc<str>;

/// The number of a client's request and its response, unique within the load.
pub type Stream = u64;

/// An action or an observation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Fact {
    // Recorded by handlers.
    Started {
        call: Call,
    },
    Progressed {
        call: Call,
    },
    /// The token has fired, and the handler is ending.
    Token {
        call: Call,
        reason: Option<String>,
    },
    /// The handler is answering.
    Answered {
        call: Call,
    },
    /// The handler was dropped before it had ended.
    Dropped {
        call: Call,
    },

    // Recorded by the server.
    Draining,
    Drained {
        ended: usize,
        cancelled: usize,
        in_time: bool,
    },
    /// The drained server is serving again.
    Serving,
    Gauge(Gauge),
    Fault {
        name: String,
    },

    // Recorded by both server and load.
    /// The process has been stalled until now.
    Stalled {
        millis: u64,
    },

    // Recorded by the load as a whole.
    Seed {
        seed: u64,
    },
    /// All clients have disconnected, and everything they left behind has had time to expire.
    Quiet,

    // Recorded by clients.
    /// About to send a call.
    Calling {
        call: Call,
        client: Arc<str>,
        route: Arc<str>,
        session: Option<Arc<str>>,
        id: String,
        stream: Stream,
    },
    /// Has sent all of it.
    Sent {
        stream: Stream,
    },
    /// About to send a GET with `Last-Event-ID` for this call.
    Resuming {
        call: Call,
        session: Option<Arc<str>>,
        last_event_id: String,
        stream: Stream,
    },
    Head {
        stream: Stream,
        status: u16,
    },
    /// An event that is not an answer.
    Event {
        stream: Stream,
        id: Option<String>,
    },
    /// An answer, and the call whose handler wrote it.
    Answer {
        stream: Stream,
        id: String,
        of: String,
        whole: bool,
    },
    /// A JSON-RPC error.
    Error {
        stream: Stream,
        id: String,
        code: i64,
    },
    /// About to open a session's standalone stream.
    Listening {
        session: Option<Arc<str>>,
        stream: Stream,
    },
    /// Stops reading.
    Stops {
        stream: Stream,
    },
    /// About to close the connection.
    Closing {
        stream: Stream,
        how: CloseKind,
    },
    /// Has closed it.
    Closed {
        stream: Stream,
    },
    /// The server has ended the response or the connection.
    StreamEnded {
        stream: Stream,
        clean: bool,
    },
    /// About to send `notifications/cancelled`.
    Cancelling {
        call: Call,
    },
    /// The server has accepted the cancellation.
    Cancelled {
        call: Call,
    },
    /// About to have the server end the call's stream (SEP-1699).
    Polling {
        call: Call,
    },
    /// Uses the id of a call in flight for another call, which is forbidden.
    Reused {
        call: Call,
        by: Call,
    },
    Deleting {
        session: Arc<str>,
    },
    Deleted {
        session: Arc<str>,
        status: u16,
    },
    /// Another request has been sent, and this is the response's status.
    Probed {
        what: String,
        status: Option<u16>,
    },
    /// What an SDK has returned to its user.
    Outcome {
        call: Call,
        text: Option<String>,
        error: Option<String>,
    },
}

/// How a client closes its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseKind {
    Fin,
    Reset,
    /// A half-close: it only stops sending.
    Half,
    /// Sends bytes of a further request before closing.
    Pipelined,
    /// A proxy resets both sides.
    Proxy,
}

/// The server's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gauge {
    /// The sum of all layers' `Calls::len`.
    pub calls: usize,
    /// Session ids, by route.
    pub sessions: BTreeMap<String, Vec<String>>,
    /// Allocated memory in KiB, not including what the allocator retains.
    pub allocated_kib: usize,
    pub descriptors: usize,
    pub tasks: usize,
}

/// The file that a process writes its facts to.
#[derive(Debug, Clone)]
pub struct Log(Arc<File>);

// === impl Log ===

impl Log {
    /// Opens the file for appending, creating it if it does not exist.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be opened.
    pub fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self(Arc::new(file)))
    }

    /// Records a fact with the current time.
    ///
    /// # Panics
    ///
    /// Panics if the write fails, because an incomplete log proves nothing.
    pub fn write(&self, fact: Fact) {
        let line = Line { at: now(), fact };
        let mut text = serde_json::to_vec(&line).expect("a fact is JSON");
        text.push(b'\n');
        (&*self.0).write_all(&text).expect("the log can be written");
    }
}

/// Reads all facts from these files, sorted by time.
///
/// # Errors
///
/// Fails if a file cannot be read, or if a line is not a fact.
pub fn read(paths: &[impl AsRef<Path>]) -> io::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for path in paths {
        for line in BufReader::new(File::open(path)?).lines() {
            lines.push(serde_json::from_str(&line?)?);
        }
    }
    lines.sort_by_key(|line: &Line| line.at);
    Ok(lines)
}
