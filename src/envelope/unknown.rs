//! Why nothing is known of a body.

use std::fmt;

/// Why the calls of a POST body are not known.
///
/// Such a body is passed on as it is, and no disconnect cancels what comes of it. [`Display`] gives a
/// few words for a log line.
///
/// [`Display`]: fmt::Display
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unknown {
    /// The body is not JSON (RFC 8259), or not as `serde_json` reads it.
    NotJson,
    /// The body ends inside a JSON value, or is empty.
    Truncated,
    /// Containers are nested deeper than the 127 levels that `serde_json` reads.
    TooDeep,
    /// A key that the envelope depends on comes twice in one object.
    DuplicateKey,
    /// A key of the message or its `params` is written with an escape, so that `id` could hide in it.
    EscapedKey,
    /// `method` is not a string, or the `params` of a request are not an object.
    WrongType,
    /// The `id` of a request is neither a string nor, beyond doubt, an integer that fits an `i64`.
    BadId,
    /// The body is not a JSON-RPC 2.0 message (JSON-RPC 2.0, sections 4 and 5).
    NotAMessage,
    /// The body is an array: a batch, which only MCP 2025-03-26 had.
    Batch,
    /// The body is longer than the cap up to which bodies are kept for reading, 4 MiB, or came in more than
    /// 16,384 frames.
    TooLarge,
    /// `content-type` is not `application/json`.
    ContentType,
    /// The body is compressed: it has a `content-encoding`.
    ContentEncoding,
    /// The inner service accepted the request (2xx) and did not read its body to the end.
    NotRead,
}

// === impl Unknown ===

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotJson => "not json",
            Self::Truncated => "json cut short",
            Self::TooDeep => "nested too deep",
            Self::DuplicateKey => "duplicate key",
            Self::EscapedKey => "escape in a key",
            Self::WrongType => "method or params of a wrong type",
            Self::BadId => "not a usable id",
            Self::NotAMessage => "not a json-rpc message",
            Self::Batch => "a batch",
            Self::TooLarge => "body too large",
            Self::ContentType => "content type not json",
            Self::ContentEncoding => "body compressed",
            Self::NotRead => "body not read to its end",
        })
    }
}
