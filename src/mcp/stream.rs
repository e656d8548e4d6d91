//! The event streams of a session, in which the ends of calls are seen and cancelled calls are muted.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::{
    Stream, StreamExt,
    future::{self, Either, select},
};
use rmcp::transport::streamable_http_server::session::ServerSseMessage;

use super::{answers, kept, session::InUse};
use crate::{
    call::{CallId, CallInfo, DetachCause},
    exchange::{Attachment, Exchange},
    registry::{Form, NOBODYS, numbers},
    timer::Migration,
};

/// The inner manager's stream of a call.
///
/// Dropped before its end, while the call runs on, it is read on by a task: then the call is known to
/// complete, and its session is never blocked by a channel that nobody reads.
pub(super) struct CallStream<S: Stream<Item = ServerSseMessage> + Send + 'static> {
    // Boxed because a drop must be able to hand it to the task, and it may not be `Unpin`. One
    // allocation of the stream's size, which is a pointer for rmcp's own manager.
    stream: Option<Pin<Box<S>>>,
    call: Option<BoundCall>,
    /// The session is in use as long as the stream is read. Last, so that the call is seen to go on before.
    used: Option<InUse>,
}

/// A call whose stream is watched. Dropped before its end, the stream has gone.
pub(super) struct BoundCall {
    attachment: Attachment,
    form: Form,
    /// The number of its stream, which rmcp's event ids have after the slash.
    stream: Option<u64>,
    watched: Watched,
    /// Whether the session manager was given its request and has not answered.
    is_opening: bool,
}

/// Who reads a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    /// Its client.
    ByClient,
    /// A task, for the end of the call only.
    ByTask,
    /// Nobody: it has ended, and that was reported.
    NoMore,
}

// === impl CallStream ===

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> CallStream<S> {
    pub(super) fn new(stream: S, call: Option<BoundCall>, used: Option<InUse>) -> Self {
        Self {
            stream: Some(Box::pin(stream)),
            call,
            used,
        }
    }
}

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> Stream for CallStream<S> {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return Poll::Ready(None);
        };
        let event = ready!(stream.as_mut().poll_next(cx));
        match &event {
            Some(event) => {
                if let Some(call) = &mut this.call {
                    call.note(event);
                }
                if let Some(call) = this.call.take_if(|call| call.is_answered_by(event)) {
                    call.answered(event, this.used.as_ref());
                }
            }
            None => {
                this.stream = None;
                if let Some(call) = this.call.take() {
                    call.ended_by_server(this.used.as_ref());
                }
            }
        }
        Poll::Ready(event)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.stream.as_ref().map_or((0, Some(0)), Stream::size_hint)
    }
}

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> Drop for CallStream<S> {
    fn drop(&mut self) {
        let (Some(stream), Some(mut call)) = (self.stream.take(), self.call.take()) else {
            return;
        };
        // In this order, so that a call without a client always has a reader that will see its end.
        call.hand_to_task();
        call.attachment.drop_stream();
        if call.attachment.exchange.signal.reason().is_none() {
            let registry = call.attachment.exchange.registry().clone();
            let task = read_on(stream, call, self.used.take());
            registry.timer().spawn(Migration::Always, task);
        }
    }
}

/// A stream without what was on its way when its call was cancelled. Its session is in use as long as it lives.
pub(super) fn without_muted<S>(
    stream: S,
    used: Option<InUse>,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync + 'static
where
    S: Stream<Item = ServerSseMessage> + Send + Sync + 'static,
{
    stream.filter(move |event| {
        let message = event.message.as_deref();
        let overtook = used.as_ref().zip(message);
        future::ready(!overtook.is_some_and(|(used, message)| used.muted.is_muted(message)))
    })
}

/// Reads a stream until the answer of its call, its end, or the end of the call: the stream of a call whose id was used
/// again gives nothing, and does not end.
pub(super) async fn read_on(
    mut stream: Pin<Box<impl Stream<Item = ServerSseMessage>>>,
    mut call: BoundCall,
    used: Option<InUse>,
) {
    let exchange = call.attachment.exchange.clone();
    let token = exchange.signal.token();
    let cancelled = pin!(token.cancelled());
    let ended = pin!(exchange.until_ended(call.attachment.id));
    let mut over = select(cancelled, ended);
    while let Either::Left((event, _)) = select(stream.next(), &mut over).await {
        let Some(event) = event else {
            return call.expect_answer_elsewhere(used.as_ref());
        };
        call.note(&event);
        if call.is_answered_by(&event) {
            return call.answered(&event, used.as_ref());
        }
    }
}

// === impl BoundCall ===

impl BoundCall {
    pub(super) fn new(attachment: Attachment, form: Form) -> Self {
        Self {
            attachment,
            form,
            stream: None,
            watched: Watched::ByClient,
            is_opening: false,
        }
    }

    /// A call whose request is about to be given to the session manager.
    pub(super) fn opening(attachment: Attachment, form: Form) -> Self {
        let mut call = Self::new(attachment, form);
        call.is_opening = true;
        call
    }

    /// A call whose stream is read on for its end only.
    pub(super) fn of_nobody(exchange: Arc<Exchange>, id: CallId, form: Form) -> Self {
        let attachment = Attachment {
            exchange,
            id,
            generation: NOBODYS,
        };
        let mut call = Self::new(attachment, form);
        call.hand_to_task();
        call
    }

    pub(super) fn info(&self) -> Option<&CallInfo> {
        self.attachment.exchange.call(self.attachment.id)
    }

    pub(super) fn exchange(&self) -> &Arc<Exchange> {
        &self.attachment.exchange
    }

    /// Notes that the manager took its request.
    pub(super) fn opened(&mut self) {
        self.is_opening = false;
        self.attachment.exchange.opened(self.attachment.id);
    }

    /// A task will read its stream on.
    #[cold]
    fn hand_to_task(&mut self) {
        self.watched = Watched::ByTask;
        let Attachment { exchange, id, .. } = &self.attachment;
        exchange.read_on(*id);
    }

    /// Notes that the stream has ended without the answer, which can only come by at the session's transport. If another
    /// stream of the call lives, this one has ended because of that.
    fn expect_answer_elsewhere(&self, used: Option<&InUse>) {
        let Attachment { exchange, id, .. } = &self.attachment;
        if let Some(used) = used {
            used.early_ends.allow();
        }
        if exchange.is_detached(*id) {
            exchange.has_no_stream(*id);
        }
    }

    /// Notes what its client may resume with.
    fn note(&mut self, event: &ServerSseMessage) {
        let Some(id) = &event.event_id else {
            return;
        };
        let exchange = &self.attachment.exchange;
        exchange.mark_passed(true, event.retry);
        let number = match self.form {
            Form::Rmcp => numbers(id.as_bytes()).map(|(_, stream)| stream),
            Form::Any => None,
        };
        if number.is_none() || number != self.stream {
            let (call, form) = (self.attachment.id, self.form);
            exchange.at_home(|core| core.name(call, id.as_bytes(), form));
            self.stream = number;
        }
    }

    fn is_answered_by(&self, event: &ServerSseMessage) -> bool {
        let answered = event.message.as_deref().and_then(answers);
        let Attachment { exchange, id, .. } = &self.attachment;
        let call = answered.zip(exchange.call(*id));
        call.is_some_and(|(answered, call)| *call.request_id() == answered.into())
    }

    fn answered(mut self, event: &ServerSseMessage, used: Option<&InUse>) {
        // The others are kept longer, and each would keep a whole board of the shelf.
        let shelf = used.filter(|_| self.watched == Watched::ByClient);
        self.watched = Watched::NoMore;
        let Attachment { exchange, id, .. } = &self.attachment;
        if used.is_some_and(|used| used.early_ends.are_possible()) {
            let _copy = exchange.close_passage();
        }
        exchange.answered(*id, || kept::keep(event, shelf.map(|used| &used.shelf)));
    }

    /// Notes that the manager refused its request.
    pub(super) fn refused(mut self) {
        self.watched = Watched::NoMore;
        self.is_opening = false;
        self.attachment.exchange.refused(&self.attachment);
    }

    #[cold]
    fn ended_by_server(mut self, used: Option<&InUse>) {
        self.watched = Watched::NoMore;
        self.attachment.detach(DetachCause::EndedByServer, false);
        self.expect_answer_elsewhere(used);
    }
}

impl Drop for BoundCall {
    fn drop(&mut self) {
        let Attachment { exchange, id, .. } = &self.attachment;
        match self.watched {
            // It never got as far as a stream.
            Watched::ByClient => {
                exchange.read_on(*id);
                self.attachment.drop_stream();
                exchange.lose_sight(*id);
            }
            Watched::ByTask => exchange.lose_sight(*id),
            Watched::NoMore => {}
        }
        if self.is_opening {
            exchange.given_up(*id);
        }
    }
}
