//! Tracks what keeps a session from being idle: requests and streams being read.
//!
//! A request uses its session from the moment the layer receives it (or the manager, if there is no layer) until the response
//! head is ready. A stream uses its session until it is dropped, even if only a background task is still reading it. Calls
//! without a stream and answers retained for disconnected clients are not uses; the registry tracks them instead.
//!
//! The session manager also counts the streams it returns, each until it ends or its client disconnects, so that a client is
//! considered lost only while it is not reading any stream.

use std::{mem, ops::Deref, sync::Arc};

use rmcp::transport::streamable_http_server::session::ServerSseMessage;

use super::{
    answered_id,
    idle::ClientStreamEnd,
    session::{Session, Sessions},
};

/// A use of a session, which keeps the session from being idle until dropped.
pub(super) struct SessionUse {
    session: Arc<Session>,
    stream: ClientStream,
    /// Whether the stream keeps the client from being considered lost.
    is_counted: bool,
    /// `false` for a standalone stream that is not counted as a use.
    counts_as_use: bool,
}

/// The kind of stream a client is reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientStream {
    None,
    /// A tracked call's stream, which reports disconnects itself, or an answered call's stream.
    Call,
    /// An untracked call's stream. If it is dropped before the answer arrives, the call might keep running unobserved.
    Untracked,
    /// A standalone stream, which stays open until the server ends it or the client disconnects.
    Standalone,
}

// === impl Sessions ===

impl Sessions {
    /// Begins a use of a session, or returns `None` if it does not exist or is already ending.
    pub(super) fn begin_use(&self, id: &str) -> Option<SessionUse> {
        let session = self.find(id)?;
        session.begin_use();
        Some(SessionUse::new(session))
    }
}

// === impl SessionUse ===

impl SessionUse {
    fn new(session: Arc<Session>) -> Self {
        Self {
            session,
            stream: ClientStream::None,
            is_counted: false,
            counts_as_use: true,
        }
    }

    /// Records what kind of stream the client is reading.
    pub(super) fn with_stream(mut self, stream: ClientStream) -> Self {
        self.stream = stream;
        self.is_counted = stream != ClientStream::None && self.begin_stream();
        if stream == ClientStream::Standalone && self.ignores_standalone_streams() {
            self.counts_as_use = false;
            self.session.end_use();
        }
        self
    }

    /// Records that the client has disconnected from its stream. The session remains in use.
    pub(super) fn on_disconnect(&mut self) {
        self.end_stream(ClientStreamEnd::Disconnected);
    }

    /// Records that the server has ended the stream. The session remains in use.
    pub(super) fn on_stream_end(&mut self) {
        self.end_stream(ClientStreamEnd::Ended);
    }

    /// Records an event yielded by the stream.
    pub(super) fn on_event(&mut self, event: &ServerSseMessage) {
        match self.stream {
            ClientStream::Untracked => {
                if event.message.as_deref().and_then(answered_id).is_some() {
                    self.stream = ClientStream::Call;
                }
            }
            ClientStream::Standalone if self.is_counted || !self.counts_as_use => {
                if let Some(id) = &event.event_id {
                    self.standalone_ids.record(id);
                }
            }
            ClientStream::None | ClientStream::Call | ClientStream::Standalone => {}
        }
    }

    fn end_stream(&mut self, end: ClientStreamEnd) {
        self.stream = ClientStream::None;
        if mem::take(&mut self.is_counted) {
            self.session.end_stream(end);
        }
    }
}

impl Clone for SessionUse {
    /// Begins another use of the same session, without a stream.
    fn clone(&self) -> Self {
        self.begin_use();
        Self::new(self.session.clone())
    }
}

impl Deref for SessionUse {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Drop for SessionUse {
    fn drop(&mut self) {
        self.end_stream(match self.stream {
            ClientStream::None | ClientStream::Call => ClientStreamEnd::Ended,
            ClientStream::Untracked => ClientStreamEnd::Unobserved,
            ClientStream::Standalone => ClientStreamEnd::Disconnected,
        });
        if self.counts_as_use {
            self.session.end_use();
        }
    }
}
