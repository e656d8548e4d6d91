//! Answers, as they are kept: the registry passes them on and does not look into them.

use std::{any::Any, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::call::RequestId;

/// An answer that is kept for a client to come back for.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) content: AnswerContent,
    /// A hash of the id of its own event.
    pub(crate) event: Option<u64>,
    /// How long the server told its client to wait before it comes back.
    pub(crate) retry: Option<Duration>,
}

/// What an answer says.
#[derive(Debug, Clone)]
pub(crate) enum AnswerContent {
    /// A tool's text, which is UTF-8.
    Text(RequestId, Bytes),
    /// What it is only its session manager knows.
    Message(Arc<dyn Any + Send + Sync>),
}
