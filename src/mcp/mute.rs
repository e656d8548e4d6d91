//! The muting of what the cancelled calls of a session still send.
//!
//! rmcp drops the answer of a cancelled request, but not one that was already on its way, and not the progress or the
//! requests of a handler that goes on: they come out of the session's standalone stream. So they are kept back where the
//! session's transport takes them, and once more where its streams give them out. A handler that had asked its client for
//! something when its call was cancelled would wait without end; here it gets an error in the client's place.
//!
//! 1. Only the sending side adds to what is asked, and nobody receives meanwhile. So a receiver that found nothing asked
//!    needs no waking.
//! 2. A request is refused or answered, never lost: one lock covers the question whether its call is cancelled and the
//!    note of the request.

use std::{
    collections::{VecDeque, hash_map::RandomState},
    hash::BuildHasher,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
};

use futures_util::task::AtomicWaker;
use rmcp::{
    RoleServer,
    model::{
        GetExtensions, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, ServerJsonRpcMessage,
        ServerNotification, ServerRequest,
    },
    service::{OriginatingRequestId, RxJsonRpcMessage},
};

use super::{answers, asked::Asked, error_for};
use crate::call::{CallInfo, CancelReason, RequestId};

/// How many cancelled calls a session remembers: 256. A handler that outlives so many others is heard again.
const REMEMBERED: usize = 256;

/// The cancelled calls of a session, and what its calls have asked the client.
#[derive(Debug, Default)]
pub(super) struct Muted {
    /// Whether there is anything in `state`, so that a session without cancels and questions takes no lock.
    any: AtomicBool,
    state: Mutex<MutedIds>,
    receiver: AtomicWaker,
}

#[derive(Debug, Default)]
struct MutedIds {
    names: RandomState,
    cancelled: VecDeque<MutedCall>,
    asked: Asked,
}

/// The ids of a cancelled call, by keyed hashes: a client may choose ids of many MiB, and a session outlives its calls.
#[derive(Debug)]
struct MutedCall {
    request_id: u64,
    progress_token: Option<u64>,
}

/// What becomes of a message from a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Sent,
    Dropped,
    /// Its sender would wait for a reply that cannot come.
    Refused,
}

// === impl Muted ===

impl Muted {
    /// Mutes a call, and gives up what it has asked.
    pub(super) fn mute(&self, call: &CallInfo) {
        self.change(|state| {
            if state.cancelled.len() == REMEMBERED {
                state.cancelled.pop_front();
            }
            let cancelled = MutedCall::new(&state.names, call);
            state.cancelled.push_back(cancelled);
            state.asked.give_up(call.request_id());
        });
        self.receiver.wake();
    }

    /// Lets a new call be heard, although it has the ids of a cancelled one.
    pub(super) fn unmute(&self, call: &CallInfo) {
        if !self.any() {
            return;
        }
        self.change(|state| {
            let new = MutedCall::new(&state.names, call);
            state.cancelled.retain(|cancelled| {
                let token = new.progress_token;
                cancelled.request_id != new.request_id
                    && (token.is_none() || cancelled.progress_token != token)
            });
        });
    }

    /// Decides what becomes of a message to the client, and notes it if it is sent.
    pub(super) fn fate(&self, message: &ServerJsonRpcMessage) -> Fate {
        let is_request = matches!(message, ServerJsonRpcMessage::Request(_));
        if !is_request && !self.any() {
            return Fate::Sent;
        }
        self.change(|state| match (state.is_muted(message), is_request) {
            (true, true) => Fate::Refused,
            (true, false) => Fate::Dropped,
            (false, _) => {
                state.note(message);
                Fate::Sent
            }
        })
    }

    /// Whether a message is of a call that was cancelled after it was sent.
    pub(super) fn is_muted(&self, message: &ServerJsonRpcMessage) -> bool {
        self.any() && self.state().is_muted(message)
    }

    /// Takes note of a message from the client.
    pub(super) fn received(&self, message: &RxJsonRpcMessage<RoleServer>) {
        if let Some(id) = answers(message)
            && self.any()
        {
            self.change(|state| state.asked.answered(id));
        }
    }

    /// An answer in the client's place, to what a cancelled call has asked.
    #[cold]
    pub(super) fn answer(&self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let id = self.change(|state| state.asked.next_vain())?;
        let error = error_for(CancelReason::Requested);
        Some(JsonRpcMessage::error(error, Some(id)))
    }

    /// Has `waker` woken when there may be an answer.
    pub(super) fn wake(&self, waker: &Waker) {
        self.receiver.register(waker);
    }

    /// Whether there is anything to be muted, or to be answered.
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    #[cold]
    fn change<T>(&self, change: impl FnOnce(&mut MutedIds) -> T) -> T {
        let mut state = self.state();
        let changed = change(&mut state);
        let MutedIds {
            cancelled, asked, ..
        } = &*state;
        let none = cancelled.is_empty() && asked.is_empty();
        self.any.store(!none, Ordering::Release);
        changed
    }

    fn state(&self) -> MutexGuard<'_, MutedIds> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl MutedIds ===

impl MutedIds {
    /// Whether a message is of a cancelled call.
    fn is_muted(&self, message: &ServerJsonRpcMessage) -> bool {
        match message {
            ServerJsonRpcMessage::Request(message) => {
                origin(message).is_some_and(|origin| self.has(&origin))
            }
            ServerJsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::ProgressNotification(progress),
                ..
            }) => {
                let token = RequestId::from(&progress.params.progress_token.0);
                let token = Some(self.names.hash_one(token));
                let mut cancelled = self.cancelled.iter();
                cancelled.any(|call| call.progress_token == token)
            }
            other => answers(other).is_some_and(|id| self.has(&id.into())),
        }
    }

    fn has(&self, id: &RequestId) -> bool {
        let id = self.names.hash_one(id);
        self.cancelled.iter().any(|call| call.request_id == id)
    }

    /// Takes note of a message that goes to the client: a question, or the end of a call that may have had some.
    fn note(&mut self, message: &ServerJsonRpcMessage) {
        match message {
            ServerJsonRpcMessage::Request(message) => {
                if let Some(origin) = origin(message) {
                    self.asked.ask(message.id.clone(), origin);
                }
            }
            ServerJsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::CancelledNotification(given_up),
                ..
            }) => {
                if let Some(id) = &given_up.params.request_id {
                    self.asked.answered(id);
                }
            }
            other => {
                if let Some(id) = answers(other) {
                    self.asked.forget(&id.into());
                }
            }
        }
    }
}

// === impl MutedCall ===

impl MutedCall {
    fn new(names: &impl BuildHasher, call: &CallInfo) -> Self {
        let hash = |id: &RequestId| names.hash_one(id);
        Self {
            request_id: hash(call.request_id()),
            progress_token: call.progress_token().map(hash),
        }
    }
}

/// The call for which the client is asked.
fn origin(message: &JsonRpcRequest<ServerRequest>) -> Option<RequestId> {
    let OriginatingRequestId(origin) = message.request.extensions().get()?;
    Some(origin.into())
}

#[cfg(test)]
mod tests;
