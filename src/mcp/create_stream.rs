//! Submits a request to the inner manager and wraps the stream it returns.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::{Stream, future::Either};
use rmcp::{
    model::ClientJsonRpcMessage,
    transport::streamable_http_server::{
        SessionManager,
        session::{ServerSseMessage, SessionId},
    },
};

use super::{
    event_ids::{Seal, Sealed},
    inner::ManagerInner,
    session_use::SessionUse,
    stream::{BoundCall, CallStream},
};
use crate::{
    call::CallInfo,
    exchange::{Contest, INJECTION_TIMEOUT, PendingCancel},
};

/// A future that resolves to a request's stream.
///
/// `F` is boxed, because the inner manager's future is large and rmcp moves `CreateStream` twice (`future_size` in
/// ARCHITECTURE.md, Workarounds).
pub(super) struct CreateStream<F> {
    inner: F,
    call: Option<BoundCall>,
    untracked: Option<Box<Untracked>>,
    seal: Option<Box<Seal>>,
    /// Declared last, so that the session stays in use until `call` has reported being dropped.
    session_use: Option<SessionUse>,
}

/// An untracked request.
///
/// Once the manager has accepted it, any older call with the same id is no longer tracked, either.
pub(super) struct Untracked {
    pub(super) call: CallInfo,
    contest: Option<Contest>,
    /// `None` if the session is unknown, in which case none of its messages are suppressed.
    session_use: Option<SessionUse>,
}

// === impl CreateStream ===

impl<F> CreateStream<F> {
    pub(super) fn new(
        inner: F,
        call: Option<BoundCall>,
        untracked: Option<Box<Untracked>>,
        seal: Option<Box<Seal>>,
        session_use: Option<SessionUse>,
    ) -> Self {
        Self {
            inner,
            call,
            untracked,
            seal,
            session_use,
        }
    }
}

impl<F, S, E> Future for CreateStream<F>
where
    F: Future<Output = Result<S, E>> + Unpin,
    S: Stream<Item = ServerSseMessage> + Send + 'static,
{
    type Output = Result<CallStream<Sealed<S>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let created = ready!(Pin::new(&mut self.inner).poll(cx));
        let mut call = self.call.take();
        let untracked = self.untracked.take();
        Poll::Ready(match created {
            Ok(stream) => {
                if let Some(call) = &mut call {
                    call.on_opened();
                }
                if let Some(untracked) = untracked {
                    untracked.on_opened();
                }
                let sealed = Sealed::new(stream, self.seal.take());
                Ok(CallStream::for_request(
                    sealed,
                    call,
                    self.session_use.take(),
                ))
            }
            Err(error) => {
                if let Some(call) = call {
                    call.on_refused();
                }
                if let Some(untracked) = untracked {
                    untracked.on_refused();
                }
                Err(error)
            }
        })
    }
}

// === impl ManagerInner ===

impl<M: SessionManager> ManagerInner<M> {
    /// Submits a request to the inner manager, after any pending cancellation for the same id.
    ///
    /// Otherwise, that cancellation would cancel this request instead. Waits for at most [`INJECTION_TIMEOUT`].
    pub(super) fn submit<'a, 'b>(
        &'a self,
        id: &'b SessionId,
        message: ClientJsonRpcMessage,
        call: Option<&BoundCall>,
        untracked: Option<&Untracked>,
    ) -> impl Future<
        Output = Result<
            impl Stream<Item = ServerSseMessage> + Send + Sync + 'static + use<'a, 'b, M>,
            M::Error,
        >,
    > + Send
    + Unpin
    + use<'a, 'b, M> {
        let exchange = call.map(|call| call.exchange());
        let info = call.and_then(BoundCall::info);
        let pending = match (info, untracked) {
            (Some(info), _) => self.pending_cancel_for(id, info.request_id()),
            (None, Some(untracked)) => self.find_pending_cancel(id, untracked.call.request_id()),
            (None, None) => None,
        };
        if let Some(exchange) = exchange {
            exchange.set_pending_cancel(match &pending {
                Some(_) => PendingCancel::Awaited,
                None => PendingCancel::None,
            });
        }
        if let Some(untracked) = untracked {
            untracked.resume_delivery();
        }
        let Some(session) = pending else {
            if let Some(info) = info {
                self.resume_delivery(id, info);
            }
            return Either::Left(Box::pin(self.manager.create_stream(id, message)));
        };
        let request = info.or(untracked.map(|untracked| &untracked.call));
        let request = request.map(|request| request.request_id().clone());
        let tracked = exchange.cloned().zip(info.cloned());
        Either::Right(Box::pin(async move {
            session
                .wait_for_cancels(request.as_ref(), INJECTION_TIMEOUT)
                .await;
            if let Some((exchange, info)) = tracked {
                exchange.set_pending_cancel(PendingCancel::None);
                self.resume_delivery(id, &info);
            }
            self.manager.create_stream(id, message).await
        }))
    }
}

// === impl Untracked ===

impl Untracked {
    pub(super) fn new(
        call: CallInfo,
        contest: Option<Contest>,
        session_use: Option<SessionUse>,
    ) -> Self {
        Self {
            call,
            contest,
            session_use,
        }
    }

    /// Lets this call's messages through, regardless of any older calls.
    ///
    /// An older call with the same ids might already have been cancelled, or might be cancelled later.
    pub(super) fn resume_delivery(&self) {
        if let Some(session_use) = &self.session_use {
            session_use.suppressed.resume_delivery_untracked(&self.call);
        }
    }

    /// Stops tracking any older call with the same id, now that this call has been accepted.
    #[cold]
    fn on_opened(self) {
        if let Some(contest) = self.contest {
            contest.on_accepted();
        }
    }

    /// Removes the call from the session's untracked calls, because its request was refused.
    #[cold]
    fn on_refused(self) {
        if let Some(session_use) = &self.session_use {
            session_use
                .suppressed
                .forget_untracked(self.call.request_id());
        }
    }
}
