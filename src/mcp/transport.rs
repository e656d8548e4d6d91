//! A session's transport.
//!
//! It suppresses messages from cancelled calls and answers the requests that those calls have made to the client.

use std::{
    borrow::Cow,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::TryFutureExt;
use pin_project_lite::pin_project;
use rmcp::{
    RoleServer,
    service::{RxJsonRpcMessage, TxJsonRpcMessage},
    transport::Transport,
};

use super::{
    serve_tasks::ServeTasks,
    session::Session,
    suppress::{SendDecision, Suppressed},
};

/// The transport for a session opened through a [`CancellableSessionManager`](super::CancellableSessionManager).
///
/// ```
/// use mcp_cancel_on_disconnect::{CancellableSessionManager, transport::CancellableTransport};
/// use rmcp::transport::streamable_http_server::SessionManager;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let sessions = CancellableSessionManager::default();
/// let (id, transport): (_, CancellableTransport<_>) = sessions.create_session().await.unwrap();
/// assert!(sessions.has_session(&id).await.unwrap());
/// # drop(transport);
/// # }
/// ```
pub struct CancellableTransport<T> {
    inner: T,
    session: Arc<Session>,
    /// Taken when the task serving the session first calls `receive`.
    serve_tasks: Option<Arc<ServeTasks>>,
}

pin_project! {
    /// A future that sends a message to the client.
    ///
    /// This is a named type so that the inner future, which contains the large message, is built in place.
    #[project = SendingProj]
    enum Sending<F> {
        Forwarded { #[pin] sending: F },
        Dropped,
        Refused,
    }
}

pin_project! {
    /// Receives the client's next message, or the error reply to an abandoned request.
    ///
    /// # Cancel safety
    ///
    /// This is as cancel-safe as the inner future, because the poll that removes an error also returns it.
    struct Receive<'a, F> {
        #[pin]
        inner: F,
        suppressed: &'a Suppressed,
    }
}

/// The error for a message that was not sent.
///
/// ```
/// use mcp_cancel_on_disconnect::transport::TransportError;
///
/// /// Returns `true` if the session has failed.
/// fn is_fatal<E>(error: &TransportError<E>) -> bool {
///     !error.is_cancelled() // a cancelled call cannot make requests to its client
/// }
/// # let _ = is_fatal::<std::io::Error>;
/// ```
#[derive(Debug)]
pub struct TransportError<E>(SendError<E>);

#[derive(Debug)]
enum SendError<E> {
    Transport(E),
    Cancelled,
}

// === impl CancellableTransport ===

impl<T> CancellableTransport<T> {
    pub(super) fn new(inner: T, session: Arc<Session>, serve_tasks: Arc<ServeTasks>) -> Self {
        Self {
            inner,
            session,
            serve_tasks: Some(serve_tasks),
        }
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
        self.session.observe_answer(&item);
        match self.session.suppressed.decide(&item) {
            SendDecision::Send => Sending::Forwarded {
                sending: self.inner.send(item),
            },
            SendDecision::Drop => Sending::Dropped,
            SendDecision::Refuse => Sending::Refused,
        }
    }

    fn receive(&mut self) -> impl Future<Output = Option<RxJsonRpcMessage<RoleServer>>> + Send {
        if let Some(serve_tasks) = self.serve_tasks.take() {
            serve_tasks.begin(&self.session);
        }
        Receive {
            inner: self.inner.receive(),
            suppressed: &self.session.suppressed,
        }
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

// === impl Sending ===

impl<F, E> Future for Sending<F>
where
    F: Future<Output = Result<(), E>>,
{
    type Output = Result<(), TransportError<E>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            SendingProj::Forwarded { sending } => {
                sending.poll(cx).map_err(TransportError::from_inner)
            }
            SendingProj::Dropped => Poll::Ready(Ok(())),
            SendingProj::Refused => Poll::Ready(Err(TransportError(SendError::Cancelled))),
        }
    }
}

// === impl Receive ===

impl<F> Future for Receive<'_, F>
where
    F: Future<Output = Option<RxJsonRpcMessage<RoleServer>>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if this.suppressed.is_active()
            && let Some(answer) = this.suppressed.error_reply()
        {
            return Poll::Ready(Some(answer));
        }
        // Match in place, because messages are large and a pending poll should not move one.
        match this.inner.poll(cx) {
            Poll::Ready(received) => {
                if let Some(message) = &received {
                    this.suppressed.on_received(message);
                }
                Poll::Ready(received)
            }
            Poll::Pending if this.suppressed.is_active() => {
                this.suppressed.register_waker(cx.waker());
                // Check again, because an error might have been added before the waker was registered.
                this.suppressed
                    .error_reply()
                    .map_or(Poll::Pending, |answer| Poll::Ready(Some(answer)))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

// === impl TransportError ===

impl<E> TransportError<E> {
    fn from_inner(error: E) -> Self {
        Self(SendError::Transport(error))
    }

    /// Returns `true` if the message was a cancelled call's request to its client.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.0, SendError::Cancelled)
    }
}

impl<E> fmt::Display for TransportError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            SendError::Transport(_) => "the transport failed",
            SendError::Cancelled => "the call was cancelled",
        })
    }
}

impl<E: std::error::Error + 'static> std::error::Error for TransportError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0 {
            SendError::Transport(error) => Some(error),
            SendError::Cancelled => None,
        }
    }
}
