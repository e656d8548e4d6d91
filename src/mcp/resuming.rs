//! What a resume gets: the manager's stream, or what is known of the call without it.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::Stream;
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{ServerSseMessage, SessionId},
};

use super::{
    kept,
    session::InUse,
    shared::{Shared, is_rmcps},
    stream::{BoundCall, CallStream, read_on},
    turns::Turn,
};
use crate::{
    exchange::Attachment,
    registry::{Answer, End, NOBODYS, Named},
    timer::{Moves, in_time},
};

/// The stream of a resume. In a box: its type would name what it was asked with.
pub(super) type Resumed = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;

/// How long a resume may take that nobody waits for any more: 10 s. A manager whose client does not read may hold
/// it back.
const UNREAD_LIMIT: Duration = Duration::from_secs(10);

/// What the manager answered to a resume, whose turn it still is.
pub(super) type Asked<E> = (Result<Resumed, E>, Option<Turn>);

// === impl Shared ===

impl<M: SessionManager> Shared<M> {
    /// What the memory has for a client that has seen everything up to an event.
    pub(super) fn ended(&self, session: &SessionId, last_event_id: &str) -> Option<End<Answer>> {
        match self.named(session, last_event_id) {
            Named::Ended(end) if !kept::is_known(&end, last_event_id) => Some(end),
            _ => None,
        }
    }

    /// The manager refused a resume of a call in flight. It does so once it has sent the answer: into the
    /// call's former stream, from which nobody may have read it yet.
    pub(super) async fn overtaken(&self, session: &SessionId, last_event_id: &str) {
        let exchange = match self.named(session, last_event_id) {
            Named::Call(id) => self.exchange(id).map(|exchange| (id, exchange)),
            _ => None,
        };
        if let Some((id, exchange)) = exchange {
            exchange.wait_for_answer(id).await;
            // What another manager means by a refusal is not known. A stream that is read is not to be cut for it.
            if is_rmcps::<M>() && exchange.registry().is_in_flight(id) {
                // The answer lies where nobody reads.
                exchange.let_streams_go();
                exchange.wait_for_answer(id).await;
            }
        }
    }

    /// Waits for the turn of a resume, if it names a call in flight.
    pub(super) async fn turn(&self, session: &SessionId, last_event_id: &str) -> Option<Turn> {
        let registry = self.registry.get()?.clone();
        match self.named(session, last_event_id) {
            Named::Call(id) => Some(self.turns.enter(registry, id).come().await),
            _ => None,
        }
    }

    /// Asks the manager for a stream.
    pub(super) async fn ask(
        self: Arc<Self>,
        session: SessionId,
        last_event_id: String,
        turn: Option<Turn>,
    ) -> Asked<M::Error> {
        let resumed = self.manager.resume(&session, last_event_id).await;
        let resumed = resumed.map(|stream| -> Resumed { Box::pin(stream) });
        (resumed, turn)
    }

    /// The stream of a resume that the manager accepted, as the newest of the call that it names.
    pub(super) fn resumed(
        &self,
        session: &SessionId,
        last_event_id: &str,
        stream: Resumed,
        used: Option<&InUse>,
    ) -> CallStream<Resumed> {
        let named = self.named(session, last_event_id);
        let call = self.registry.get().and_then(|registry| match named {
            Named::Call(id) => {
                let (exchange, generation, detachment) = registry.attach(id)?;
                exchange.resumed(id, detachment);
                exchange.open_passage();
                let attachment = Attachment {
                    exchange,
                    id,
                    generation,
                };
                Some(BoundCall::new(attachment, self.form()))
            }
            Named::Batch(ids) | Named::OneOf(ids) => {
                ids.into_iter().for_each(|id| registry.spare(id));
                None
            }
            Named::Nothing | Named::Ended(_) => None,
        });
        // What it leaves to a task uses the session further.
        CallStream::new(stream, call, used.map(InUse::again))
    }

    /// A client went away while the manager was asked for the stream of its call. The manager may have given the call
    /// that stream already: what comes out of it, the answer too, comes out nowhere else. So it is read, and nothing
    /// else is changed: the client did not come back.
    pub(super) fn read_unread(
        &self,
        session: &SessionId,
        last_event_id: &str,
        asked: Pin<Box<impl Future<Output = Asked<M::Error>> + Send + 'static>>,
        used: Option<InUse>,
    ) {
        let Some(registry) = self.registry.get().cloned() else {
            return;
        };
        let Named::Call(id) = self.named(session, last_event_id) else {
            return;
        };
        let Some(exchange) = registry.call(id) else {
            return;
        };
        let attachment = Attachment {
            exchange,
            id,
            generation: NOBODYS,
        };
        let call = BoundCall::of_nobody(attachment, self.form());
        registry.timer.spawn(Moves::Always, async move {
            if let Some((Ok(stream), turn)) = in_time(UNREAD_LIMIT, asked).await {
                drop(turn);
                read_on(Box::pin(stream), call, used).await;
            }
        });
    }
}
