//! The calls, which server and client know by the same labels.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

/// How many calls a cell of the table has.
pub(crate) const ROUNDS: u32 = 5;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// rmcp in session mode. The answer is a stream.
    Session,
    /// rmcp without sessions. The answer is a stream.
    Sse,
    /// rmcp without sessions. The answer is a single JSON document, and nothing is written before it.
    Json,
    /// A handler without MCP that does not answer. A second request is pipelined behind the first, which keeps hyper
    /// from reading.
    Pipelined,
}

/// The call's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// One cell's calls.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Calls {
    pub(crate) kind: Kind,
    pub(crate) protocol: Protocol,
    pub(crate) addr: SocketAddr,
}

/// The table's rows.
pub(crate) const ROWS: [(Kind, Protocol); 7] = [
    (Kind::Session, Protocol::Http1),
    (Kind::Session, Protocol::Http2),
    (Kind::Sse, Protocol::Http1),
    (Kind::Sse, Protocol::Http2),
    (Kind::Json, Protocol::Http1),
    (Kind::Json, Protocol::Http2),
    (Kind::Pipelined, Protocol::Http1),
];

// === impl Calls ===

impl Calls {
    /// The label of one call, the same in both processes.
    pub(crate) fn label(&self, round: u32) -> String {
        let Self {
            kind,
            protocol,
            addr,
        } = self;
        format!("{kind:?}-{protocol:?}-{}-{round}", addr.port())
    }
}

// === impl Kind ===

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Session => "session, SSE",
            Self::Sse => "stateless, SSE",
            Self::Json => "stateless, JSON",
            Self::Pipelined => "a next request unread",
        })
    }
}

// === impl Protocol ===

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http1 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
        })
    }
}
