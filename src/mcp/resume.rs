//! The answer to a resume: the manager's stream, or what is known of the call without it.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt};
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{ServerSseMessage, SessionId},
};

use super::{
    event_ids::{Seal, Sealed},
    kept::{self, Completed},
    session::InUse,
    shared::SharedManager,
    spawn_on_drop::SpawnOnDrop,
    stream::{BoundCall, CallStream, read_on, without_muted},
    turns::Turn,
};
use crate::{
    call::CallId,
    exchange::{Exchange, Reading},
    registry::{Answer, End, Named},
    timer::{Migration, migrating_timeout},
};

/// A resume: which event it names in which session.
pub(super) struct ResumeRequest<'a, M> {
    pub(super) shared: &'a Arc<SharedManager<M>>,
    pub(super) session: &'a SessionId,
    pub(super) last_event_id: String,
    /// What binds the event ids of the session to it, if a store has its events.
    pub(super) seal: Option<Box<Seal>>,
    pub(super) used: Option<InUse>,
}

/// The stream of a resume. In a box: its type would name what it was asked with.
type Resumed = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;

/// What the manager answered to a resume, whose turn it still is.
type Reply<E> = (Result<Resumed, E>, Option<MyTurn>);

/// Also counts as a reader of the call: the manager may take the stream from the present reader and give it to this one.
type MyTurn = (Turn, Reading);

/// How long a resume may take whose client has left: 10 s. A manager whose client does not read may hold it back.
const UNREAD_LIMIT: Duration = Duration::from_secs(10);

// === impl ResumeRequest ===

impl<M: SessionManager> ResumeRequest<'_, M> {
    pub(super) async fn stream(
        self,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + use<M>, M::Error> {
        let (shared, session) = (self.shared, self.session);
        let turn = self.turn().await;
        let ended = self.ended();
        let is_stored = self.seal.is_some();
        let Some(event_id) = self.event_id_inside() else {
            // Nothing of another session is asked for. What is known of this one its client may have.
            return Ok(kept::replay(ended, &self.last_event_id).left_stream());
        };
        // A store has all that its client missed.
        let may_be_there = is_stored && matches!(ended, Some(End::Answered(_)));
        if ended.is_some() && !may_be_there {
            return Ok(kept::replay(ended, &self.last_event_id).left_stream());
        }
        if let Some(used) = &self.used {
            // A resume that is refused ends the stream that there is.
            used.early_ends.allow();
        }
        let asked = ask(
            shared.clone(),
            session.clone(),
            event_id.to_owned(),
            self.seal.clone(),
            turn,
        );
        let (resumed, turn) = SpawnOnDrop::new(asked, |asked| self.read_unread(asked)).await;
        if resumed.is_err() {
            self.overtaken().await;
        }
        // The call may have ended while the manager was asked.
        let resumed = match (self.ended(), resumed) {
            (Some(End::Answered(answer)), Ok(stream)) if is_stored => {
                let completed = Completed::new(stream, answer, &self.last_event_id);
                without_muted(completed.into_stream(), self.used).left_stream()
            }
            (Some(end), _) => {
                return Ok(kept::replay(Some(end), &self.last_event_id).left_stream());
            }
            (None, resumed) => {
                let stream = self.attach(resumed?);
                without_muted(stream, self.used).right_stream()
            }
        };
        // The next one is newer.
        drop(turn);
        Ok(resumed.right_stream())
    }

    /// The event as the manager inside knows it. `None` if it is not of this session.
    fn event_id_inside(&self) -> Option<&str> {
        match &self.seal {
            Some(seal) => seal.open(&self.last_event_id),
            None => Some(&self.last_event_id),
        }
    }

    fn named(&self) -> Named<Exchange> {
        self.shared.named(self.session, &self.last_event_id)
    }

    /// The call in flight that it names.
    fn call(&self) -> Option<(CallId, Arc<Exchange>)> {
        match self.named() {
            Named::Call(id, exchange) => Some((id, exchange)),
            _ => None,
        }
    }

    /// What the memory has for a client that has seen everything up to the event.
    fn ended(&self) -> Option<End<Answer>> {
        self.shared.ended(self.session, &self.last_event_id)
    }

    /// Waits for its turn, if it names a call in flight.
    async fn turn(&self) -> Option<MyTurn> {
        let (id, exchange) = self.call()?;
        let reading = Reading::new(exchange, id);
        Some((self.shared.turns.enter(id).come().await, reading))
    }

    /// The manager refused a resume of a call in flight. rmcp's own does so once it has sent the answer into the call's former
    /// stream, from which nobody may have read it yet.
    async fn overtaken(&self) {
        if let Some((id, exchange)) = self.call() {
            exchange.wait_for_answer(id).await;
            // What another manager or an event store means by a refusal is not known. A stream that is read is not to be cut for
            // it.
            if self.shared.is_rmcps() && exchange.is_in_flight(id) {
                // The answer lies where nobody reads.
                exchange.let_streams_go();
                exchange.wait_for_answer(id).await;
            }
        }
    }

    /// The stream that the manager gave it, as the newest of the call that it names.
    fn attach(&self, stream: Resumed) -> CallStream<Resumed> {
        let call = match self.named() {
            Named::Call(id, exchange) => exchange.attach(id).map(|attachment| {
                exchange.open_passage();
                BoundCall::new(attachment, self.shared.form())
            }),
            Named::OneOf(calls) => {
                for (id, exchange) in calls {
                    exchange.spare(id);
                }
                None
            }
            Named::Nothing | Named::Ended(_) => None,
        };
        // A task that the stream is left to uses the session further.
        CallStream::new(stream, call, self.used.as_ref().map(InUse::again))
    }

    /// Reads the stream that the manager may have given the call already, although the client left meanwhile: what
    /// comes out of it, the answer too, comes out nowhere else. Nothing else is changed, as the client did not resume.
    fn read_unread(&self, asked: Pin<Box<impl Future<Output = Reply<M::Error>> + Send + 'static>>) {
        let Some((id, exchange)) = self.call() else {
            return;
        };
        let registry = exchange.registry().clone();
        let call = BoundCall::of_nobody(exchange, id, self.shared.form());
        let used = self.used.as_ref().map(InUse::again);
        registry.timer().spawn(Migration::Always, async move {
            if let Some((Ok(stream), turn)) = migrating_timeout(UNREAD_LIMIT, asked).await {
                drop(turn);
                read_on(Box::pin(stream), call, used).await;
            }
        });
    }
}

/// Asks the manager for a stream.
async fn ask<M: SessionManager>(
    shared: Arc<SharedManager<M>>,
    session: SessionId,
    event_id: String,
    seal: Option<Box<Seal>>,
    turn: Option<MyTurn>,
) -> Reply<M::Error> {
    let resumed = shared.manager.resume(&session, event_id).await;
    let resumed = resumed.map(|stream| -> Resumed { Box::pin(Sealed::new(stream, seal)) });
    (resumed, turn)
}
