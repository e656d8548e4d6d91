//! The transport of a session, at which answers come by whose clients have gone.

use std::{borrow::Cow, fmt, sync::Arc};

use rmcp::{
    RoleServer,
    service::{RxJsonRpcMessage, TxJsonRpcMessage},
    transport::{Transport, streamable_http_server::session::SessionId},
};

use crate::{answers::Answers, ids::Incarnation};

/// The transport of a session that [`ClusterSessionManager`](crate::ClusterSessionManager) made. It changes no message.
pub struct ClusterTransport<T> {
    inner: T,
    session: SessionId,
    life: Incarnation,
    answers: Arc<Answers>,
}

// === impl ClusterTransport ===

impl<T> ClusterTransport<T> {
    pub(crate) fn new(
        inner: T,
        session: SessionId,
        life: Incarnation,
        answers: Arc<Answers>,
    ) -> Self {
        Self {
            inner,
            session,
            life,
            answers,
        }
    }
}

impl<T: Transport<RoleServer>> Transport<RoleServer> for ClusterTransport<T> {
    type Error = T::Error;

    fn name() -> Cow<'static, str> {
        T::name()
    }

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.answers.pass(&self.session, self.life, &item);
        self.inner.send(item)
    }

    fn receive(&mut self) -> impl Future<Output = Option<RxJsonRpcMessage<RoleServer>>> + Send {
        self.inner.receive()
    }

    fn close(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.inner.close()
    }
}

impl<T> fmt::Debug for ClusterTransport<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterTransport").finish_non_exhaustive()
    }
}
