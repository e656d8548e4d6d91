//! Facts that handlers and clients record: one JSON object per line, one write per line.
//!
//! A fact is an action or an observation of its writer. A client records an action before it and again after it, so the
//! true time is between the two.

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

/// The name of a call: its [`Job`](crate::job::Job).
pub type Call = Arc<str>;

/// The number of a client's request and its response, unique in the load.
pub type Stream = u64;

/// An action or an observation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Fact {
    // The handlers.
    Started {
        call: Call,
    },
    Progressed {
        call: Call,
    },
    /// The token fired, and the handler ends.
    Token {
        call: Call,
        reason: Option<String>,
    },
    /// The handler answers.
    Answered {
        call: Call,
    },
    /// The handler was dropped before it ended.
    Dropped {
        call: Call,
    },

    // The server.
    Draining,
    Drained {
        ended: usize,
        cancelled: usize,
        in_time: bool,
    },
    /// The drained server serves again.
    Serving,
    Gauge(Gauge),
    Fault {
        name: String,
    },

    // Server and load.
    /// The process was stalled until now.
    Stalled {
        millis: u64,
    },

    // The load as a whole.
    Seed {
        seed: u64,
    },
    /// All clients have disconnected, and everything they left has had time to expire.
    Quiet,

    // The clients.
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
    /// About to send a GET with `Last-Event-ID`, for this call.
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
    /// About to open the standalone stream of a session.
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
    /// The server ended the response, or the connection.
    StreamEnded {
        stream: Stream,
        clean: bool,
    },
    /// About to send `notifications/cancelled`.
    Cancelling {
        call: Call,
    },
    /// The server accepted the cancel.
    Cancelled {
        call: Call,
    },
    /// About to have the server end the stream of the call (SEP-1699).
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
    /// Another request was sent, with this status in response.
    Probed {
        what: String,
        status: Option<u16>,
    },
    /// The result that an SDK returned to its user.
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
    /// Bytes of a further request are sent before the close.
    Pipelined,
    /// A proxy resets both sides.
    Proxy,
}

/// The server's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gauge {
    /// `Calls::len` of all layers.
    pub calls: usize,
    /// The ids of the sessions, by route.
    pub sessions: BTreeMap<String, Vec<String>>,
    /// Memory that is allocated, in KiB. It excludes what the allocator retains.
    pub allocated_kib: usize,
    pub descriptors: usize,
    pub tasks: usize,
}

/// The file into which a process writes its facts.
#[derive(Debug, Clone)]
pub struct Log(Arc<File>);

// === impl Log ===

impl Log {
    /// Opens the file for appending. Creates the file if it does not exist.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened.
    pub fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self(Arc::new(file)))
    }

    /// Records a fact with the current time.
    ///
    /// # Panics
    ///
    /// If the write fails, because an incomplete log proves nothing.
    pub fn write(&self, fact: Fact) {
        let line = Line { at: now(), fact };
        let mut text = serde_json::to_vec(&line).expect("a fact is JSON");
        text.push(b'\n');
        (&*self.0).write_all(&text).expect("the log can be written");
    }
}

/// Reads all facts of these files, sorted by time.
///
/// # Errors
///
/// If a file cannot be read, or if a line is not a fact.
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
