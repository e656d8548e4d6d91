//! Responds to a resume with the manager's stream or the call's retained outcome.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt, stream};
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{ServerSseMessage, SessionId},
};

use super::{
    event_ids::{Seal, Sealed},
    inner::ManagerInner,
    replay::{self, ReplayedAnswer},
    resume_queue::ResumePermit,
    session_use::{ClientStream, SessionUse},
    spawn_on_drop::SpawnOnDrop,
    stream::{BoundCall, CallStream, read_in_background, without_suppressed},
};
use crate::{
    call::CallId,
    exchange::{BackgroundReader, Exchange},
    registry::{Answer, EventMatch, RetainedOutcome},
    timer::{Migration, migrating_timeout},
};

/// A client's request to resume one of its session's streams after a given event.
pub(super) struct ResumeRequest<'a, M> {
    pub(super) shared: &'a Arc<ManagerInner<M>>,
    pub(super) session: &'a SessionId,
    pub(super) last_event_id: String,
    /// Binds the event ids to the session. `None` without an event store.
    pub(super) seal: Option<Box<Seal>>,
    pub(super) session_use: Option<SessionUse>,
}

/// The resumed stream, boxed because the unboxed type would borrow the request.
type Resumed = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;

/// The manager's reply to a resume and the permit still held by the resume.
type Reply<E> = (Result<Resumed, E>, Option<HeldPermit>);

/// A permit and a background reader for the call.
///
/// The reader is needed because the manager might move the stream from its current reader to this resume.
type HeldPermit = (ResumePermit, BackgroundReader);

/// Maximum time to wait for the manager's reply to a resume whose client has disconnected.
///
/// The manager might block if another of the session's streams is not being read.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

// === impl ResumeRequest ===

impl<M: SessionManager> ResumeRequest<'_, M> {
    /// Returns the stream for the client.
    pub(super) async fn into_stream(
        self,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + use<M>, M::Error> {
        let (shared, session) = (self.shared, self.session);
        let permit = self.acquire_permit().await;
        let retained = self.retained();
        let is_stored = self.seal.is_some();
        let Some(event_id) = self.plain_event_id() else {
            // Don't pass on another session's event id. The retained outcome may be sent, because it belongs to this session.
            return Ok(replay::replay(retained, &self.last_event_id).left_stream());
        };
        // An event store might also contain other events the client has missed.
        let may_be_stored = is_stored && matches!(retained, Some(RetainedOutcome::Answered(_)));
        if retained.is_some() && !may_be_stored {
            return Ok(replay::replay(retained, &self.last_event_id).left_stream());
        }
        if let Some(session_use) = &self.session_use {
            // The current stream ends if the manager refuses the resume.
            session_use.early_ends.mark_possible();
        }
        let request = request_resume(
            shared.clone(),
            session.clone(),
            event_id.to_owned(),
            self.seal.clone(),
            permit,
        );
        let (resumed, permit) =
            SpawnOnDrop::new(request, |request| self.drain_after_disconnect(request)).await;
        if resumed.is_err() {
            self.await_raced_answer().await;
        }
        // Check again, because the call might have ended while the manager was handling the request.
        let resumed = match (self.retained(), resumed) {
            (Some(RetainedOutcome::Answered(answer)), Ok(stream)) if is_stored => {
                let replayed = ReplayedAnswer::new(stream, answer, &self.last_event_id);
                let session_use = self
                    .session_use
                    .map(|session_use| session_use.with_stream(ClientStream::Call));
                without_suppressed(replayed.into_stream(), session_use).left_stream()
            }
            (Some(end), _) => {
                return Ok(replay::replay(Some(end), &self.last_event_id).left_stream());
            }
            (None, resumed) => {
                let resumed = resumed?;
                let priming_event = if is_stored {
                    self.priming_event()
                } else {
                    None
                };
                let (stream, client_stream) = self.attach(resumed);
                let session_use = self
                    .session_use
                    .map(|session_use| session_use.with_stream(client_stream));
                let missed = without_suppressed(stream, session_use);
                stream::iter(priming_event).chain(missed).right_stream()
            }
        };
        // Release the permit only after attaching, so that the next resume becomes the newer generation.
        drop(permit);
        Ok(resumed.right_stream())
    }

    /// Returns the inner manager's own event id, or `None` if it does not belong to this session.
    fn plain_event_id(&self) -> Option<&str> {
        match &self.seal {
            Some(seal) => seal.open(&self.last_event_id),
            None => Some(&self.last_event_id),
        }
    }

    /// Returns `true` if the event belongs to a standalone stream.
    ///
    /// rmcp's own event ids show this, because only the ids of a call's events contain a slash. For other managers, the id is
    /// looked up among the most recent ids sent on standalone streams.
    fn is_standalone(&self) -> bool {
        if self.shared.is_local_manager() {
            return !self.last_event_id.contains('/');
        }
        let session_use = self.session_use.as_ref();
        session_use
            .is_some_and(|session_use| session_use.standalone_ids.contains(&self.last_event_id))
    }

    /// Returns the priming event for a call's resumed stream of stored events.
    ///
    /// Returns `None` if the event matches no in-flight call.
    ///
    /// rmcp ends the resumed stream after the stored events. If there are none, a client using the TypeScript SDK would be left
    /// without an event id for its next resume, and would not resume the call again.
    fn priming_event(&self) -> Option<ServerSseMessage> {
        let calls = self.match_event().in_flight();
        let (_, exchange) = calls.first()?;
        Some(replay::priming_event(&self.last_event_id, exchange.retry()))
    }

    fn match_event(&self) -> EventMatch<Exchange> {
        self.shared.match_event(self.session, &self.last_event_id)
    }

    /// Returns the in-flight call that the event belongs to.
    fn call(&self) -> Option<(CallId, Arc<Exchange>)> {
        match self.match_event() {
            EventMatch::Call(id, exchange) => Some((id, exchange)),
            _ => None,
        }
    }

    /// Returns the outcome retained for a client whose last event is `last_event_id`.
    fn retained(&self) -> Option<RetainedOutcome<Answer>> {
        self.shared.retained_for(self.session, &self.last_event_id)
    }

    /// Waits for the call's permit, which an earlier resume might be holding.
    ///
    /// After a timeout, the resume proceeds without the permit. Returns `None` if the event does not belong to an in-flight call.
    async fn acquire_permit(&self) -> Option<HeldPermit> {
        let (id, exchange) = self.call()?;
        let reader = BackgroundReader::new(exchange, id);
        Some((self.shared.resume_queue.enqueue(id).acquire().await, reader))
    }

    /// Waits for the answer after the manager has refused to resume an in-flight call.
    ///
    /// rmcp's own manager refuses once it has sent the answer on the previous stream, where it might still be unread.
    async fn await_raced_answer(&self) {
        if let Some((id, exchange)) = self.call() {
            exchange.wait_for_answer(id).await;
            // A refusal by another manager could mean anything, so it must not close a stream that is still being read.
            if self.shared.is_local_manager() && exchange.is_in_flight(id) {
                // The answer is in a stream that its client is not reading.
                exchange.close_streams();
                exchange.wait_for_answer(id).await;
            }
        }
    }

    /// Attaches the manager's stream to the call as its newest generation.
    ///
    /// Also returns what kind of stream the client is reading, or `ClientStream::None` for a tracked call's stream, which
    /// [`CallStream`] records itself.
    fn attach(&self, stream: Resumed) -> (CallStream<Resumed>, ClientStream) {
        let (call, client_stream) = match self.match_event() {
            EventMatch::Call(id, exchange) => {
                let attachment = exchange.attach(id);
                let call = attachment.map(|attachment| {
                    exchange.reopen_late_answer();
                    BoundCall::new(attachment, self.shared.event_id_format())
                });
                // If there is no attachment, the call has just ended.
                let client_stream = call
                    .as_ref()
                    .map_or(ClientStream::Call, |_| ClientStream::None);
                (call, client_stream)
            }
            EventMatch::Ambiguous(calls) => {
                for (id, exchange) in calls {
                    exchange.mark_maybe_resumed(id);
                }
                (None, ClientStream::Untracked)
            }
            EventMatch::Ended(_) => (None, ClientStream::Call),
            EventMatch::Nothing if self.is_standalone() => (None, ClientStream::Standalone),
            EventMatch::Nothing => (None, ClientStream::Untracked),
        };
        // A task that reads the rest of a call's stream uses the session too.
        let session_use = self
            .session_use
            .as_ref()
            .filter(|_| call.is_some())
            .cloned();
        let stream = CallStream::new(stream, call, session_use);
        (stream, client_stream)
    }

    /// Keeps reading this resume's stream in the background after its client has disconnected.
    ///
    /// The manager might already have moved the call's stream to this resume, in which case this is the only stream that still
    /// yields messages, including the answer. The call stays detached, because its client did not complete the resume.
    ///
    /// Drops the resume if its event does not belong to an in-flight call, or if the manager does not reply within
    /// [`DRAIN_TIMEOUT`].
    fn drain_after_disconnect(
        &self,
        request: Pin<Box<impl Future<Output = Reply<M::Error>> + Send + 'static>>,
    ) {
        let Some((id, exchange)) = self.call() else {
            return;
        };
        let registry = exchange.registry().clone();
        let call = BoundCall::background(exchange, id, self.shared.event_id_format());
        let session_use = self.session_use.clone();
        registry.timer().spawn(Migration::Always, async move {
            if let Some((Ok(stream), permit)) = migrating_timeout(DRAIN_TIMEOUT, request).await {
                drop(permit);
                read_in_background(Box::pin(stream), call, session_use).await;
            }
        });
    }
}

async fn request_resume<M: SessionManager>(
    shared: Arc<ManagerInner<M>>,
    session: SessionId,
    event_id: String,
    seal: Option<Box<Seal>>,
    permit: Option<HeldPermit>,
) -> Reply<M::Error> {
    let resumed = shared.manager.resume(&session, event_id).await;
    let resumed = resumed.map(|stream| -> Resumed { Box::pin(Sealed::new(stream, seal)) });
    (resumed, permit)
}
