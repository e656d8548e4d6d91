//! A call, as far as its stream has to know it.

use std::sync::Arc;

use mcp_cancel_on_disconnect::CallToken;

use super::credentials::Credentials;
use crate::message::IdKey;

/// The call that a stream is for.
#[derive(Debug)]
pub struct Call {
    pub(super) id: Box<str>,
    pub(super) key: IdKey,
    pub(super) token: Option<CallToken>,
    pub(super) credentials: Option<Arc<Credentials>>,
    /// What else is kept for it, in bytes.
    pub(super) with_extra: usize,
}

// === impl Call ===

impl Call {
    /// The call with this id, which is JSON text. `None` if that is no id.
    pub fn new(id: &str) -> Option<Self> {
        Some(Self {
            key: IdKey::of(id)?,
            id: id.into(),
            token: None,
            credentials: None,
            with_extra: 0,
        })
    }

    /// How many bytes are kept for it besides its stream.
    pub(super) fn with_extra(mut self, bytes: usize) -> Self {
        self.with_extra = bytes;
        self
    }

    /// The token of the request that it came with. It is told when the answer is here.
    pub fn token(mut self, token: Option<CallToken>) -> Self {
        self.token = token;
        self
    }

    /// With which credentials it came. The server behind [`Resumable`](super::Resumable) is asked about a client that resumes
    /// it with others. A command knows no credentials, so its calls have none.
    pub(super) fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(Arc::new(credentials));
        self
    }
}
