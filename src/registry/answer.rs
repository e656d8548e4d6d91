//! Retained answers, which the registry passes on without reading them.

use std::{any::Any, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::call::RequestId;

/// An answer retained for a resuming client.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) content: AnswerContent,
    /// Hash of the event id the answer was sent with.
    pub(crate) event_id_hash: Option<u64>,
    /// The server's `retry`: how long the client waits before resuming.
    pub(crate) retry: Option<Duration>,
}

#[derive(Debug, Clone)]
pub(crate) enum AnswerContent {
    /// A tool's text, in UTF-8.
    Text(RequestId, Bytes),
    /// A message whose type only the session manager knows.
    Message(Arc<dyn Any + Send + Sync>),
}
