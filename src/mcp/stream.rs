//! A session's event streams.
//!
//! They detect when a call has ended and filter out messages from cancelled calls.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::{
    Stream, StreamExt,
    future::{Either, select},
};
use pin_project_lite::pin_project;
use rmcp::transport::streamable_http_server::session::ServerSseMessage;

use super::{
    answered_id, replay,
    session_use::{ClientStream, SessionUse},
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause},
    exchange::{Attachment, Exchange},
    registry::{EventIdFormat, NO_GENERATION, numbers},
    timer::Migration,
};

/// The inner manager's stream for a request or a resume.
///
/// If it is dropped while its call is still running, a task reads the rest of it, so that the answer is still observed and an
/// unread channel never blocks the session.
pub(super) struct CallStream<S: Stream<Item = ServerSseMessage> + Send + 'static> {
    // Boxed because `Drop` moves it to the task, and it might not be `Unpin`. The allocation is small: a stream from rmcp's own
    // manager is the size of a pointer.
    stream: Option<Pin<Box<S>>>,
    call: Option<BoundCall>,
    /// Keeps the session in use while the stream is being read. Declared last, so that `call`, which reports being dropped, is
    /// dropped first.
    session_use: Option<SessionUse>,
}

pin_project! {
    /// A stream without messages from cancelled calls.
    ///
    /// If it is dropped before it ends, its client has disconnected.
    struct Unsuppressed<S> {
        #[pin]
        stream: S,
        session_use: Option<SessionUse>,
    }
}

/// A call whose stream is being observed. Dropping it before that stream has ended reports the stream as lost.
pub(super) struct BoundCall {
    attachment: Attachment,
    event_id_format: EventIdFormat,
    /// The stream's number: the part after the slash in rmcp's event ids.
    stream: Option<u64>,
    reader: StreamReader,
    /// Whether the session manager has yet to accept or refuse the request.
    is_dispatching: bool,
}

/// Who is reading a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamReader {
    Client,
    /// A task that is only waiting for the call to end.
    Task,
    /// Nothing is left to report: the answer, the refusal or the stream's end has been reported.
    None,
}

// === impl CallStream ===

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> CallStream<S> {
    /// Creates the stream for a request, which is untracked if `call` is `None`.
    pub(super) fn for_request(
        stream: S,
        call: Option<BoundCall>,
        session_use: Option<SessionUse>,
    ) -> Self {
        let session_use = if call.is_some() {
            session_use
        } else {
            session_use.map(|session_use| session_use.with_stream(ClientStream::Untracked))
        };
        Self::new(stream, call, session_use)
    }

    pub(super) fn new(stream: S, call: Option<BoundCall>, session_use: Option<SessionUse>) -> Self {
        let session_use = if call.is_some() {
            session_use.map(|session_use| session_use.with_stream(ClientStream::Call))
        } else {
            session_use
        };
        Self {
            stream: Some(Box::pin(stream)),
            call,
            session_use,
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
                    call.record(event);
                }
                if let Some(call) = this.call.take_if(|call| call.is_answered_by(event)) {
                    call.on_answered(event, this.session_use.as_ref());
                } else if this.call.is_none()
                    && let Some(session_use) = &mut this.session_use
                {
                    session_use.on_event(event);
                }
            }
            None => {
                this.stream = None;
                if let Some(call) = this.call.take() {
                    call.on_ended_by_server(this.session_use.as_ref());
                }
                if let Some(session_use) = &mut this.session_use {
                    session_use.on_stream_end();
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
        let has_ended = call.attachment.exchange.has_call_ended();
        if has_ended {
            call.reader = StreamReader::None;
        } else {
            // Set the reader first, so that it can still tell when the call ends if dropping the stream detaches the call.
            call.set_background_reader();
            call.attachment.on_stream_dropped();
        }
        let cancelled = call.attachment.exchange.signal.reason();
        if matches!(cancelled, None | Some(CancelReason::ClientDisconnected))
            && let Some(session_use) = &mut self.session_use
        {
            session_use.on_disconnect();
        }
        // Only a call that is still running needs a task to read its stream.
        if !has_ended && cancelled.is_none() {
            let registry = call.attachment.exchange.registry().clone();
            let task = read_in_background(stream, call, self.session_use.take());
            registry.timer().spawn(Migration::Always, task);
        }
    }
}

/// Filters messages from cancelled calls out of a stream.
///
/// The returned stream uses its session until it is dropped.
pub(super) fn without_suppressed<S>(
    stream: S,
    session_use: Option<SessionUse>,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync + 'static
where
    S: Stream<Item = ServerSseMessage> + Send + Sync + 'static,
{
    Unsuppressed {
        stream,
        session_use,
    }
}

impl<S: Stream<Item = ServerSseMessage>> Stream for Unsuppressed<S> {
    type Item = ServerSseMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        loop {
            let event = ready!(this.stream.as_mut().poll_next(cx));
            match (&event, this.session_use.as_mut()) {
                (Some(event), Some(session_use)) if is_suppressed(event, session_use) => continue,
                (Some(event), Some(session_use)) => session_use.on_event(event),
                (None, Some(session_use)) => session_use.on_stream_end(),
                _ => {}
            }
            return Poll::Ready(event);
        }
    }
}

fn is_suppressed(event: &ServerSseMessage, session_use: &SessionUse) -> bool {
    let message = event.message.as_deref();
    message.is_some_and(|message| session_use.suppressed.is_suppressed(message))
}

/// Reads a stream until it yields the answer, or until the stream or the call ends.
///
/// Watching the stream alone is not enough, because once a call's id has been reused, its stream neither yields anything nor
/// ends.
pub(super) async fn read_in_background(
    mut stream: Pin<Box<impl Stream<Item = ServerSseMessage>>>,
    mut call: BoundCall,
    session_use: Option<SessionUse>,
) {
    let exchange = call.attachment.exchange.clone();
    let token = exchange.signal.token();
    let cancelled = pin!(token.cancelled());
    let ended = pin!(exchange.wait_until_ended(call.attachment.id));
    let mut finished = select(cancelled, ended);
    while let Either::Left((event, _)) = select(stream.next(), &mut finished).await {
        let Some(event) = event else {
            return call.on_end_without_answer(session_use.as_ref());
        };
        call.record(&event);
        if call.is_answered_by(&event) {
            return call.on_answered(&event, session_use.as_ref());
        }
    }
}

// === impl BoundCall ===

impl BoundCall {
    pub(super) fn new(attachment: Attachment, format: EventIdFormat) -> Self {
        Self {
            attachment,
            event_id_format: format,
            stream: None,
            reader: StreamReader::Client,
            is_dispatching: false,
        }
    }

    /// Creates a call whose request is about to be submitted to the session manager.
    pub(super) fn dispatching(attachment: Attachment, format: EventIdFormat) -> Self {
        let mut call = Self::new(attachment, format);
        call.is_dispatching = true;
        call
    }

    /// Creates a call whose stream is read only to find out when the call ends.
    pub(super) fn background(exchange: Arc<Exchange>, id: CallId, format: EventIdFormat) -> Self {
        let attachment = Attachment {
            exchange,
            id,
            generation: NO_GENERATION,
        };
        let mut call = Self::new(attachment, format);
        call.set_background_reader();
        call
    }

    pub(super) fn info(&self) -> Option<&CallInfo> {
        self.attachment.exchange.call(self.attachment.id)
    }

    pub(super) fn exchange(&self) -> &Arc<Exchange> {
        &self.attachment.exchange
    }

    /// Records that the manager has accepted the request.
    pub(super) fn on_opened(&mut self) {
        self.is_dispatching = false;
        self.attachment.exchange.on_dispatched(self.attachment.id);
    }

    /// Records that a task is now reading the stream.
    #[cold]
    fn set_background_reader(&mut self) {
        self.reader = StreamReader::Task;
        let Attachment { exchange, id, .. } = &self.attachment;
        exchange.add_background_reader(*id);
    }

    /// Records that the stream ended before the answer was delivered.
    ///
    /// If it was the last stream, only the session's transport can still observe the answer. Any stream of the call that is
    /// still open has replaced this one.
    fn on_end_without_answer(&self, session_use: Option<&SessionUse>) {
        let Attachment { exchange, id, .. } = &self.attachment;
        if let Some(session_use) = session_use {
            session_use.early_ends.mark_possible();
        }
        if exchange.is_detached(*id) {
            exchange.on_last_stream_end(*id);
        }
    }

    /// Records the event id after which the client can resume.
    fn record(&mut self, event: &ServerSseMessage) {
        let Some(id) = &event.event_id else {
            return;
        };
        let exchange = &self.attachment.exchange;
        exchange.record_stream_meta(true, event.retry);
        let number = match self.event_id_format {
            EventIdFormat::Rmcp => numbers(id.as_bytes()).map(|(_, stream)| stream),
            EventIdFormat::Other => None,
        };
        // With rmcp's format, all of a stream's events share its number, so it has to be recorded only once.
        if number.is_none() || number != self.stream {
            let (call, format) = (self.attachment.id, self.event_id_format);
            exchange.with_session(|session| session.record_event_id(call, id.as_bytes(), format));
            self.stream = number;
        }
    }

    fn is_answered_by(&self, event: &ServerSseMessage) -> bool {
        let answered = event.message.as_deref().and_then(answered_id);
        let Attachment { exchange, id, .. } = &self.attachment;
        let call = answered.zip(exchange.call(*id));
        call.is_some_and(|(answered, call)| *call.request_id() == answered.into())
    }

    fn on_answered(mut self, event: &ServerSseMessage, session_use: Option<&SessionUse>) {
        // An answer read by a task is retained for longer, so in the arena it would keep an entire chunk allocated.
        let arena_owner = session_use.filter(|_| self.reader == StreamReader::Client);
        self.reader = StreamReader::None;
        let Attachment { exchange, id, .. } = &self.attachment;
        if session_use.is_some_and(|session_use| session_use.early_ends.are_possible()) {
            let _ = exchange.close_late_answer();
        }
        exchange.on_answered(*id, || {
            replay::retain(
                event,
                arena_owner.map(|session_use| &session_use.text_arena),
            )
        });
    }

    /// Records that the manager has refused the request.
    pub(super) fn on_refused(mut self) {
        self.reader = StreamReader::None;
        self.is_dispatching = false;
        self.attachment.exchange.on_refused(&self.attachment);
    }

    #[cold]
    fn on_ended_by_server(mut self, session_use: Option<&SessionUse>) {
        self.reader = StreamReader::None;
        self.attachment.detach(DetachCause::EndedByServer, false);
        self.on_end_without_answer(session_use);
    }
}

impl Drop for BoundCall {
    fn drop(&mut self) {
        let Attachment { exchange, id, .. } = &self.attachment;
        match self.reader {
            // The request was dropped before it had a stream.
            StreamReader::Client => {
                exchange.add_background_reader(*id);
                self.attachment.on_stream_dropped();
                exchange.remove_background_reader(*id);
            }
            StreamReader::Task => exchange.remove_background_reader(*id),
            StreamReader::None => {}
        }
        if self.is_dispatching {
            exchange.on_dispatch_abandoned(*id);
        }
    }
}
