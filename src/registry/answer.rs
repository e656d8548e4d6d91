//! Retained answers. The registry passes them on without reading them.

use std::{any::Any, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::call::RequestId;

/// An answer that is retained for a client that resumes.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) content: AnswerContent,
    /// Hash of the event id with which the answer was sent.
    pub(crate) event_id_hash: Option<u64>,
    /// The server's `retry`, which is how long the client waits before it resumes.
    pub(crate) retry: Option<Duration>,
}

#[derive(Debug, Clone)]
pub(crate) enum AnswerContent {
    /// A tool's text, which is UTF-8.
    Text(RequestId, Bytes),
    /// A message in a type that only the session manager knows.
    Message(Arc<dyn Any + Send + Sync>),
}
