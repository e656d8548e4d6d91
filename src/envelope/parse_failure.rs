//! Reasons a body could not be parsed.

use std::fmt;

use memchr::memmem;

/// The reason the layer can't tell which call a POST body contains.
///
/// The body is passed on unchanged, and no call is tracked for it. When in doubt, nothing is cancelled: if the body may be JSON-RPC, the
/// request's [`CallToken`](crate::CallToken) does not fire when the client disconnects. If the body is certainly something else, the token
/// fires, as it would on any route without MCP:
///
/// | failure | does the token fire on a disconnect? |
/// |---|---|
/// | [`ContentType`](Self::ContentType) | yes, unless the header is repeated, or specifies a type like `application/json-rpc` or `…+json` |
/// | [`NotJson`](Self::NotJson), [`Truncated`](Self::Truncated) | yes, unless the body starts like an object or an array |
/// | [`NotAMessage`](Self::NotAMessage) | yes, unless the body contains `"jsonrpc"` |
/// | [`NotRead`](Self::NotRead) | yes, unless what was read starts like an object or an array, or the request has a session header |
/// | any other | no |
///
/// Its [`Display`](fmt::Display) output is a short phrase for log lines.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use axum::{Router, body::{Body, Bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, observe::ParseFailure};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let unread = Arc::new(Mutex::new(Vec::new()));
/// let log = unread.clone();
/// let layer = CancelOnDisconnectLayer::new().observe_fn(move |event| {
///     if let Event::UnparsedBody { reason, .. } = event {
///         log.lock().unwrap().push(*reason);
///     }
/// });
/// let app: Router = Router::new().route("/mcp", post(async |_: Bytes| "ok")).layer(layer);
///
/// let request = Request::post("/mcp").header("content-type", "application/json");
/// app.oneshot(request.body(Body::from("[]")).unwrap()).await.unwrap();
/// assert_eq!(*unread.lock().unwrap(), [ParseFailure::Batch]);
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ParseFailure {
    /// The body is not JSON (RFC 8259), or `serde_json` rejects part of it.
    NotJson,
    /// The body ends inside a JSON value or is empty.
    Truncated,
    /// Containers are nested deeper than the 127 levels that `serde_json` accepts.
    TooDeep,
    /// An object has a duplicate envelope key.
    DuplicateKey,
    /// A key in the message or its `params` contains an escape, which could hide an `id`.
    EscapedKey,
    /// `method` is not a string, or a request's `params` are not an object.
    WrongType,
    /// A request's `id` is neither a string nor unambiguously an integer that fits in an `i64`.
    BadId,
    /// The body is not a JSON-RPC 2.0 message (JSON-RPC 2.0, sections 4 and 5).
    NotAMessage,
    /// The body is an array, which is a batch. Only MCP 2025-03-26 has batches.
    Batch,
    /// The body exceeds 4 MiB, the maximum size parsed, or arrives in more than 16,384 frames.
    TooLarge,
    /// `content-type` is not `application/json`, is absent, or is repeated.
    ContentType,
    /// The body is compressed: it has a `content-encoding`.
    ContentEncoding,
    /// The inner service accepted the request (2xx) without reading its body to the end.
    NotRead,
}

/// A body that could not be parsed, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnparsedBody {
    pub(crate) reason: ParseFailure,
    /// Whether the body may be JSON-RPC.
    pub(crate) is_ambiguous: bool,
}

// === impl ParseFailure ===

impl ParseFailure {
    /// Returns `true` if a body with this failure may still be JSON-RPC.
    pub(crate) fn is_ambiguous(self, body: &[u8]) -> bool {
        match self {
            Self::NotJson | Self::Truncated | Self::NotRead => looks_like_jsonrpc(body),
            Self::NotAMessage => memmem::find(body, br#""jsonrpc""#).is_some(),
            Self::ContentType => false,
            Self::TooDeep
            | Self::DuplicateKey
            | Self::EscapedKey
            | Self::WrongType
            | Self::BadId
            | Self::Batch
            | Self::TooLarge
            | Self::ContentEncoding => true,
        }
    }
}

/// Returns `true` if a body starts like an object or an array.
///
/// Allows a leading byte order mark, because some servers accept one.
fn looks_like_jsonrpc(body: &[u8]) -> bool {
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    matches!(body.trim_ascii_start().first(), Some(b'{' | b'['))
}

impl fmt::Display for ParseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotJson => "not JSON",
            Self::Truncated => "truncated JSON",
            Self::TooDeep => "nested too deeply",
            Self::DuplicateKey => "duplicate key",
            Self::EscapedKey => "escaped key",
            Self::WrongType => "wrong type for method or params",
            Self::BadId => "unusable id",
            Self::NotAMessage => "not a JSON-RPC message",
            Self::Batch => "batch not supported",
            Self::TooLarge => "body too large",
            Self::ContentType => "content type is not JSON",
            Self::ContentEncoding => "compressed body",
            Self::NotRead => "body not fully read",
        })
    }
}
