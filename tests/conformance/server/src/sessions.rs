//! Sessions whose tools can end their own stream.
//!
//! SEP-1699 lets a server end a call's stream and have the client poll for the rest. rmcp supports that
//! ([`LocalSessionHandle::close_sse_stream`]), but a handler has no way to find its own stream. So [`Sessions`]
//! opens the streams itself, as [`LocalSessionManager`] does, and puts an [`OwnStream`] into the message that
//! opened one.

use std::{sync::Arc, time::Duration};

use rmcp::{
    model::{ClientJsonRpcMessage, GetExtensions, ServerJsonRpcMessage},
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager,
        session::{
            EventStore, ServerSseMessage, SessionId,
            local::{
                LocalSessionHandle, LocalSessionManager, LocalSessionManagerError, SessionError,
            },
        },
    },
};
use tokio_stream::{Stream, wrappers::ReceiverStream};

/// rmcp's sessions, except that handlers find an [`OwnStream`] in their request's extensions.
#[derive(Default)]
pub(crate) struct Sessions(LocalSessionManager);

/// The stream that a request has opened.
#[derive(Clone)]
pub(crate) struct OwnStream {
    session: LocalSessionHandle,
    id: u64,
}

// === impl OwnStream ===

impl OwnStream {
    /// Ends the stream without an answer and asks the client to resume after `retry`.
    pub(crate) async fn end(&self, retry: Duration) -> Result<(), SessionError> {
        self.session.close_sse_stream(self.id, Some(retry)).await
    }
}

// === impl Sessions ===

impl Sessions {
    async fn find(&self, id: &SessionId) -> Result<LocalSessionHandle, LocalSessionManagerError> {
        let sessions = self.0.sessions.read().await;
        let found = sessions.get(id).cloned();
        found.ok_or_else(|| LocalSessionManagerError::SessionNotFound(id.clone()))
    }
}

impl SessionManager for Sessions {
    type Error = LocalSessionManagerError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_stream(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let session = self.find(id).await?;
        let opened = session.establish_request_wise_channel().await?;
        if let ClientJsonRpcMessage::Request(request) = &mut message
            && let Some(id) = opened.http_request_id
        {
            let session = session.clone();
            let own = OwnStream { session, id };
            request.request.extensions_mut().insert(own);
        }
        session
            .push_message(message, opened.http_request_id)
            .await?;
        Ok(ReceiverStream::new(opened.inner))
    }

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        self.0.create_session().await
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        self.0.initialize_session(id, message).await
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.0.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.0.close_session(id).await
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), Self::Error> {
        self.0.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.0.create_standalone_stream(id).await
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.0.resume(id, last_event_id).await
    }

    async fn restore_session(
        &self,
        id: SessionId,
    ) -> Result<RestoreOutcome<Self::Transport>, Self::Error> {
        self.0.restore_session(id).await
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        self.0.event_store()
    }
}
