//! What a resume gets: the manager's stream, or what is known of the call without it.
//!
//! The manager is asked for the resumes of a call one at a time, in the order in which they came: rmcp gives the call's
//! stream to whom it hears last, and ends the one before. Several that wait for room in the queue of a session may be
//! heard in any order, and one of them may be in a task by then, its client gone.

use std::{
    collections::{HashMap, hash_map::Entry},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::Stream;
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{ServerSseMessage, SessionId},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    kept,
    session::InUse,
    shared::Shared,
    stream::{BoundCall, CallStream, read_on},
};
use crate::{
    call::CallId,
    exchange::{Attachment, Registry},
    registry::{Answer, End, Moves, NOBODYS, Named, in_time},
};

/// The stream of a resume. In a box: its type would name what it was asked with.
pub(super) type Resumed = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;

/// How long a resume may take that nobody waits for any more: 10 s. A manager whose client does not read may hold
/// it back.
const UNREAD_LIMIT: Duration = Duration::from_secs(10);

/// How long a resume waits for the one before it: 4 s. It holds its call's clock for 5 s past the deadline, and the manager
/// is to be asked within that time, or the call would be cancelled although its client came back in time.
const TURN_LIMIT: Duration = Duration::from_secs(4);

/// The calls of which resumes are asked for, each with a single permit: a tokio semaphore is fair.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<CallId, Arc<Semaphore>>>);

/// A resume that waits for its turn, or has it. The next one has its turn when this is dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    /// Which counts it among those that read the call: the manager may give it the stream of whoever does so now, and
    /// somebody reads that in any case.
    registry: Arc<Registry>,
    call: CallId,
    semaphore: Arc<Semaphore>,
    /// `None` if the one before took too long.
    permit: Option<OwnedSemaphorePermit>,
}

/// What the manager answered to a resume, whose turn it still is.
pub(super) type Asked<E> = (Result<Resumed, E>, Option<Turn>);

// === impl Turns ===

impl Turns {
    fn enter(self: &Arc<Self>, registry: Arc<Registry>, call: CallId) -> Turn {
        registry.read_on(call);
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let semaphore = turns.entry(call);
        let semaphore = semaphore.or_insert_with(|| Arc::new(Semaphore::new(1)));
        Turn {
            turns: self.clone(),
            registry,
            call,
            semaphore: semaphore.clone(),
            permit: None,
        }
    }
}

// === impl Turn ===

impl Turn {
    /// Waits for those that came before, but not for long.
    async fn come(mut self) -> Self {
        let permit = in_time(TURN_LIMIT, self.semaphore.clone().acquire_owned()).await;
        self.permit = permit.and_then(Result::ok);
        self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.permit = None;
        let mut turns = self.turns.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(turn) = turns.entry(self.call)
            // The map's, and this one's.
            && Arc::strong_count(turn.get()) == 2
        {
            turn.remove();
        }
        drop(turns);
        self.registry.lose_sight(self.call);
    }
}

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
                if let Some(used) = used {
                    used.late().read_again(id);
                }
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
        registry.spawn(Moves::Always, async move {
            if let Some((Ok(stream), turn)) = in_time(UNREAD_LIMIT, asked).await {
                drop(turn);
                read_on(Box::pin(stream), call, used).await;
            }
        });
    }
}
