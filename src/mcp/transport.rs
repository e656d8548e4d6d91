//! The session's transport without what cancelled calls still send.

use std::{borrow::Cow, fmt, future::ready, sync::Arc};

use futures_util::{TryFutureExt, future::Either};
use rmcp::{
    RoleServer,
    service::{RxJsonRpcMessage, TxJsonRpcMessage},
    transport::Transport,
};

use super::late::{Fate, Late};

/// The transport of a session that
/// [`CancellableSessionManager`](super::CancellableSessionManager) made.
pub struct CancellableTransport<T> {
    inner: T,
    late: Arc<Late>,
}

/// Why a message was not sent.
#[derive(Debug)]
pub struct TransportError<E>(Kind<E>);

#[derive(Debug)]
enum Kind<E> {
    Transport(E),
    Cancelled,
}

// === impl CancellableTransport ===

impl<T> CancellableTransport<T> {
    pub(super) fn new(inner: T, late: Arc<Late>) -> Self {
        Self { inner, late }
    }
}

impl<T: Transport<RoleServer>> Transport<RoleServer> for CancellableTransport<T> {
    type Error = TransportError<T::Error>;

    fn name() -> Cow<'static, str> {
        T::name()
    }

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        match self.late.fate(&item) {
            Fate::Sent => Either::Left(self.inner.send(item).map_err(TransportError::from_inner)),
            Fate::Dropped => Either::Right(ready(Ok(()))),
            Fate::Refused => Either::Right(ready(Err(TransportError(Kind::Cancelled)))),
        }
    }

    fn receive(&mut self) -> impl Future<Output = Option<RxJsonRpcMessage<RoleServer>>> + Send {
        self.inner.receive()
    }

    fn close(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.inner.close().map_err(TransportError::from_inner)
    }
}

impl<T> fmt::Debug for CancellableTransport<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancellableTransport")
            .finish_non_exhaustive()
    }
}

// === impl TransportError ===

impl<E> TransportError<E> {
    fn from_inner(error: E) -> Self {
        Self(Kind::Transport(error))
    }

    /// Whether it was a request to the client, made for a call that is cancelled.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.0, Kind::Cancelled)
    }
}

impl<E> fmt::Display for TransportError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Transport(_) => "the transport failed",
            Kind::Cancelled => "the call is cancelled",
        })
    }
}

impl<E: std::error::Error + 'static> std::error::Error for TransportError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0 {
            Kind::Transport(error) => Some(error),
            Kind::Cancelled => None,
        }
    }
}
