//! A request on its way into the manager inside, and the stream that comes back.

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
    session::InUse,
    shared::SharedManager,
    stream::{BoundCall, CallStream},
};
use crate::{
    call::CallInfo,
    exchange::{Contest, INJECTION_LIMIT, PendingCancel},
};

/// Opens the stream of a request. `F` is in a box: it holds the message, which is large, and rmcp moves this twice.
pub(super) struct Opening<F> {
    opened: F,
    call: Option<BoundCall>,
    untracked: Option<Box<Untracked>>,
    seal: Option<Box<Seal>>,
    /// Last, so that the session is in use until the call is seen to be given up.
    used: Option<InUse>,
}

/// A request that is not tracked. Only once the manager took it does it change anything for an older call with its id.
pub(super) struct Untracked {
    pub(super) call: CallInfo,
    contest: Option<Contest>,
    /// `None` if its session is not known, in which nothing is muted.
    used: Option<InUse>,
}

// === impl Opening ===

impl<F> Opening<F> {
    pub(super) fn new(
        opened: F,
        call: Option<BoundCall>,
        untracked: Option<Box<Untracked>>,
        seal: Option<Box<Seal>>,
        used: Option<InUse>,
    ) -> Self {
        Self {
            opened,
            call,
            untracked,
            seal,
            used,
        }
    }
}

impl<F, S, E> Future for Opening<F>
where
    F: Future<Output = Result<S, E>> + Unpin,
    S: Stream<Item = ServerSseMessage> + Send + 'static,
{
    type Output = Result<CallStream<Sealed<S>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let opened = ready!(Pin::new(&mut self.opened).poll(cx));
        let mut call = self.call.take();
        let untracked = self.untracked.take();
        Poll::Ready(match opened {
            Ok(stream) => {
                if let Some(call) = &mut call {
                    call.opened();
                }
                if let Some(untracked) = untracked {
                    untracked.opened();
                }
                let sealed = Sealed::new(stream, self.seal.take());
                Ok(CallStream::new(sealed, call, self.used.take()))
            }
            Err(error) => {
                if let Some(call) = call {
                    call.refused();
                }
                if let Some(untracked) = untracked {
                    untracked.refused();
                }
                Err(error)
            }
        })
    }
}

// === impl SharedManager ===

impl<M: SessionManager> SharedManager<M> {
    /// Gives a request to the manager inside, once no cancel is on its way that would meet it.
    pub(super) fn hand_in<'a, 'b>(
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
        let awaited = match (info, untracked) {
            (Some(info), _) => self.awaits(id, info.request_id()),
            (None, Some(untracked)) => self.injecting(id, untracked.call.request_id()),
            (None, None) => None,
        };
        if let Some(exchange) = exchange {
            exchange.set_pending_cancel(match &awaited {
                Some(_) => PendingCancel::Awaited,
                None => PendingCancel::None,
            });
        }
        if let Some(untracked) = untracked {
            untracked.unmute();
        }
        let Some(session) = awaited else {
            if let Some(info) = info {
                self.unmute(id, info);
            }
            return Either::Left(Box::pin(self.manager.create_stream(id, message)));
        };
        let request = info.or(untracked.map(|untracked| &untracked.call));
        let request = request.map(|request| request.request_id().clone());
        let tracked = exchange.cloned().zip(info.cloned());
        Either::Right(Box::pin(async move {
            // As long as such a cancel may take.
            session.injected(request.as_ref(), INJECTION_LIMIT).await;
            if let Some((exchange, info)) = tracked {
                exchange.set_pending_cancel(PendingCancel::None);
                self.unmute(id, &info);
            }
            self.manager.create_stream(id, message).await
        }))
    }
}

// === impl Untracked ===

impl Untracked {
    pub(super) fn new(call: CallInfo, contest: Option<Contest>, used: Option<InUse>) -> Self {
        Self {
            call,
            contest,
            used,
        }
    }

    /// Takes its ids from cancelled calls, and keeps them from calls that are cancelled while it runs.
    pub(super) fn unmute(&self) {
        if let Some(used) = &self.used {
            used.muted.unmute_untracked(&self.call);
        }
    }

    /// The manager took it.
    #[cold]
    fn opened(self) {
        if let Some(contest) = self.contest {
            contest.lose();
        }
    }

    /// The manager refused it.
    #[cold]
    fn refused(self) {
        if let Some(used) = &self.used {
            used.muted.forget_untracked(self.call.request_id());
        }
    }
}
