//! The uses of a session: requests, and streams that clients read.
//!
//! A request uses its session until the response head. Its use starts when the layer receives it, or without a layer when the manager
//! does. A stream uses its session until it is dropped, even if only a task reads it. The registry tracks the calls without a stream,
//! and the answers that are retained for disconnected clients.
//!
//! Each stream that the session manager returns is counted from its start until it ends, or its client disconnects. So a client is
//! lost only if it is reading no stream.

use std::{mem, ops::Deref, sync::Arc};

use rmcp::transport::streamable_http_server::session::ServerSseMessage;

use super::{
    answered_id,
    idle::ReadEnd,
    session::{Session, Sessions},
};

/// A use of a session. The session is not idle before the use is dropped.
pub(super) struct SessionUse {
    session: Arc<Session>,
    stream: ClientStream,
    /// `false` for a standalone stream that is not counted as a use.
    is_use: bool,
}

/// The stream that the client is reading while it is using its session. Not recorded without a lost timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientStream {
    None,
    /// The stream of a tracked call, which reports a disconnect, or of a call that is answered.
    OfCall,
    /// The stream of an untracked call. If it is dropped before the answer, the call may continue unobserved.
    OfUntracked,
    /// It ends when the server ends it, or when the client disconnects.
    Standalone,
}

// === impl Sessions ===

impl Sessions {
    /// Starts a use of a session. Returns `None` if there is no such session, or if it is ending.
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
            is_use: true,
        }
    }

    /// Records that the client of this use reads a stream.
    pub(super) fn with_stream(mut self, stream: ClientStream) -> Self {
        if stream != ClientStream::None && self.begin_stream() {
            self.stream = stream;
        }
        if stream == ClientStream::Standalone && self.ignores_standalone_streams() {
            self.is_use = false;
            self.session.end_use();
        }
        self
    }

    /// Records that the client has disconnected from its stream. The session is still in use.
    pub(super) fn on_disconnect(&mut self) {
        self.end_stream(ReadEnd::Disconnected);
    }

    /// Records that the server has ended the stream. The session is still in use.
    pub(super) fn on_stream_end(&mut self) {
        self.end_stream(ReadEnd::Ended);
    }

    /// Records an event of the stream.
    pub(super) fn on_event(&mut self, event: &ServerSseMessage) {
        match self.stream {
            ClientStream::None | ClientStream::OfCall => {}
            ClientStream::OfUntracked => {
                if event.message.as_deref().and_then(answered_id).is_some() {
                    self.stream = ClientStream::OfCall;
                }
            }
            ClientStream::Standalone => {
                if let Some(id) = &event.event_id {
                    self.standalone_ids.record(id);
                }
            }
        }
    }

    fn end_stream(&mut self, end: ReadEnd) {
        if mem::replace(&mut self.stream, ClientStream::None) != ClientStream::None {
            self.session.end_stream(end);
        }
    }
}

impl Clone for SessionUse {
    /// Starts another use of the same session, without a stream.
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
            ClientStream::None | ClientStream::OfCall => ReadEnd::Ended,
            ClientStream::OfUntracked => ReadEnd::LeftUnobserved,
            ClientStream::Standalone => ReadEnd::Disconnected,
        });
        if self.is_use {
            self.session.end_use();
        }
    }
}
