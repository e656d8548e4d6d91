//! What a stream needs to know about its call.

use std::sync::Arc;

use mcp_cancel_on_disconnect::CallToken;

use super::credentials::Credentials;
use crate::message::IdKey;

/// The call that a stream belongs to.
#[derive(Debug)]
pub struct Call {
    pub(super) id: Box<str>,
    pub(super) key: IdKey,
    pub(super) token: Option<CallToken>,
    pub(super) credentials: Option<Arc<Credentials>>,
    /// Number of bytes used by the call in addition to its stream.
    pub(super) extra_bytes: usize,
}

// === impl Call ===

impl Call {
    /// Creates a call from its id, given as JSON text. Returns `None` if the text is not an id.
    pub fn new(id: &str) -> Option<Self> {
        Some(Self {
            key: IdKey::of(id)?,
            id: id.into(),
            token: None,
            credentials: None,
            extra_bytes: 0,
        })
    }

    /// Sets the number of bytes used by the call in addition to its stream.
    pub(super) fn with_extra_bytes(mut self, bytes: usize) -> Self {
        self.extra_bytes = bytes;
        self
    }

    /// Sets the token from the call's request. It is notified when the call is answered.
    pub fn token(mut self, token: Option<CallToken>) -> Self {
        self.token = token;
        self
    }

    /// Sets the credentials from the call's request.
    ///
    /// If a client resumes with different credentials, [`Resumable`](super::Resumable) has its server check them. Calls to a
    /// command have no credentials.
    pub(super) fn credentials(mut self, credentials: Arc<Credentials>) -> Self {
        self.credentials = Some(credentials);
        self
    }
}
