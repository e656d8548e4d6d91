//! A call's ids: its identity in this process and the id chosen by its client.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use http::{Extensions, Uri};

/// The `id` of a JSON-RPC request, parsed the way rmcp does.
///
/// A number never equals a string: `1` is not `"1"` (JSON-RPC 2.0, section 4). An integer-valued float is read as that integer, so `1.0` is
/// `1`.
///
/// ```
/// use mcp_cancel_on_disconnect::RequestId;
///
/// assert_ne!(RequestId::Number(1), RequestId::String("1".into()));
/// assert_eq!(RequestId::Number(7).to_string(), "7");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(
    clippy::exhaustive_enums,
    reason = "JSON-RPC 2.0 defines these two kinds of id and no other"
)]
pub enum RequestId {
    /// An integer.
    Number(i64),
    /// A string, compared byte by byte.
    String(Arc<str>),
}

/// A call's identity, unique within this process.
///
/// JSON-RPC ids are not unique, because every stateless client numbers its own requests from 1, so [`Calls`](crate::Calls) identifies a
/// call by its `CallId` instead. It is a number, and can be parsed back from its text form:
///
/// ```
/// use mcp_cancel_on_disconnect::{CallId, CancelOnDisconnectLayer, CancelReason};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let id: CallId = "7".parse()?; // from a log line, or from a form
/// assert_eq!(id.to_string(), "7");
/// assert_eq!(u64::from(id), 7);
///
/// let calls = CancelOnDisconnectLayer::new().calls();
/// assert!(!calls.cancel(id, CancelReason::Requested), "no such call");
/// assert!("seven".parse::<CallId>().is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(u64);

/// The error returned when a string is not a valid [`CallId`].
///
/// ```
/// use mcp_cancel_on_disconnect::{CallId, ParseCallIdError};
///
/// let error: ParseCallIdError = "-1".parse::<CallId>().unwrap_err();
/// assert_eq!(error.to_string(), "invalid call id");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseCallIdError(());

/// A session id and its issuer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SessionKey {
    pub(crate) scope: Scope,
    pub(crate) id: Arc<str>,
}

/// An issuer of session ids. The same id issued in another scope refers to a different session.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Scope {
    /// An instance of this crate's session manager.
    Manager(u64),
    /// The server behind this request path. See [`Scope::of_request`].
    Path(Box<str>),
}

/// A session call's key: its session and its JSON-RPC id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) session: SessionKey,
    pub(crate) request: RequestId,
}

// === impl RequestId ===

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::String(string) => string.fmt(f),
        }
    }
}

impl From<&RequestId> for serde_json::Value {
    fn from(id: &RequestId) -> Self {
        match id {
            RequestId::Number(number) => (*number).into(),
            RequestId::String(string) => string.as_ref().into(),
        }
    }
}

// === impl CallId ===

impl CallId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // `AcqRel` makes whatever happened before one id was drawn visible to the owner of every later id. A drain closes the registry,
        // then draws an id and only looks for calls with earlier ids, so a call with a later id must find the registry closed.
        Self(NEXT.fetch_add(1, Ordering::AcqRel))
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for CallId {
    type Err = ParseCallIdError;

    /// Parses the number written by [`Display`](fmt::Display).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| ParseCallIdError(()))
    }
}

impl From<CallId> for u64 {
    fn from(id: CallId) -> Self {
        id.0
    }
}

// === impl ParseCallIdError ===

impl fmt::Display for ParseCallIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("invalid call id")
    }
}

impl std::error::Error for ParseCallIdError {}

// === impl Scope ===

impl Scope {
    /// Returns the scope of a request to a server without this crate's session manager.
    ///
    /// The scope is the path requested by the client. Inside an axum nest, which strips a prefix from the path, the remaining path is added
    /// to it.
    pub(crate) fn of_request(uri: &Uri, extensions: &Extensions) -> Self {
        let path = uri.path();
        match requested_path(extensions).filter(|requested| *requested != path) {
            // The space is unambiguous, because paths never contain spaces.
            Some(requested) => Self::Path(format!("{requested} {path}").into()),
            None => Self::Path(path.into()),
        }
    }

    /// Returns the path, or `None` for a session manager.
    pub(crate) fn path(&self) -> Option<&str> {
        match self {
            Self::Path(path) => Some(path),
            Self::Manager(_) => None,
        }
    }
}

/// Returns the path before axum's nests stripped their prefixes.
///
/// This gives each nest its own scope.
#[cfg(feature = "axum")]
fn requested_path(extensions: &Extensions) -> Option<&str> {
    let uri = extensions.get::<axum::extract::OriginalUri>()?;
    Some(uri.path())
}

/// Returns `None`, because axum's extension type requires the `axum` feature.
#[cfg(not(feature = "axum"))]
fn requested_path(_: &Extensions) -> Option<&str> {
    None
}
