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
        Mutex, MutexGuard,
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
use crate::call::{CallInfo, RequestId};

use crate::lock::lock;

/// Number of cancelled calls that a session remembers: 256. A handler that outlives 256 others is heard again. It is also the
/// number of calls that may run in a session at once without being tracked. If more do, the session mutes nothing from then on.
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
    /// Later calls that run and are not tracked: what has their ids is theirs.
    untracked: VecDeque<MutedCall>,
    /// There were too many of these at once: nothing can be told apart any more.
    is_overrun: bool,
    asked: Asked,
}

/// The ids of a cancelled call, by keyed hashes: a client may choose ids of many MiB, and a session outlives its calls.
#[derive(Debug)]
struct MutedCall {
    /// `None` if another call has it now. The same holds for the token.
    request_id: Option<u64>,
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
            new.take_from(&mut state.cancelled);
            new.take_from(&mut state.untracked);
        });
    }

    /// The same for a call that is not tracked: calls that are cancelled later are older, whatever ids they have.
    #[cold]
    pub(super) fn unmute_untracked(&self, call: &CallInfo) {
        self.change(|state| {
            let new = MutedCall::new(&state.names, call);
            new.take_from(&mut state.cancelled);
            new.take_from(&mut state.untracked);
            state.is_overrun |= state.untracked.len() == REMEMBERED;
            if !state.is_overrun {
                state.untracked.push_back(new);
            }
        });
    }

    /// A call that is not tracked was refused, or cancelled by its client: no answer of it will pass.
    #[cold]
    pub(super) fn forget_untracked(&self, request: &RequestId) {
        if self.any() {
            self.change(|state| state.forget_untracked(request));
        }
    }

    /// Lets progress with the token of a cancelled call be heard: another call has the token now.
    #[cold]
    pub(super) fn unmute_token(&self, call: &CallInfo) {
        self.change(|state| {
            let mut token = MutedCall::new(&state.names, call);
            token.request_id = None;
            token.take_from(&mut state.cancelled);
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
        let error = error_for(None);
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
            cancelled,
            untracked,
            asked,
            ..
        } = &*state;
        let none = cancelled.is_empty() && untracked.is_empty() && asked.is_empty();
        self.any.store(!none, Ordering::Release);
        changed
    }

    fn state(&self) -> MutexGuard<'_, MutedIds> {
        lock(&self.state)
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
                self.is_of_cancelled(|call| call.progress_token == token)
            }
            other => answers(other).is_some_and(|id| self.has(&id.into())),
        }
    }

    fn has(&self, id: &RequestId) -> bool {
        let id = Some(self.names.hash_one(id));
        self.is_of_cancelled(|call| call.request_id == id)
    }

    fn is_of_cancelled(&self, has_it: impl Fn(&MutedCall) -> bool) -> bool {
        self.cancelled.iter().any(&has_it)
            && !self.is_overrun
            && !self.untracked.iter().any(&has_it)
    }

    /// Takes note of a message that is sent to the client: a question, or the end of a call that may have had some.
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
                    let id = id.into();
                    self.asked.forget(&id);
                    self.forget_untracked(&id);
                }
            }
        }
    }

    fn forget_untracked(&mut self, request: &RequestId) {
        if !self.untracked.is_empty() {
            let id = Some(self.names.hash_one(request));
            self.untracked.retain(|call| call.request_id != id);
        }
    }
}

// === impl MutedCall ===

impl MutedCall {
    fn new(names: &impl BuildHasher, call: &CallInfo) -> Self {
        let hash = |id: &RequestId| names.hash_one(id);
        Self {
            request_id: Some(hash(call.request_id())),
            progress_token: call.progress_token().map(hash),
        }
    }

    /// Takes its ids from calls that had them before.
    fn take_from(&self, calls: &mut VecDeque<Self>) {
        for call in calls.iter_mut() {
            call.request_id = call
                .request_id
                .filter(|_| call.request_id != self.request_id);
            let is_taken = call.progress_token == self.progress_token;
            call.progress_token = call.progress_token.filter(|_| !is_taken);
        }
        calls.retain(|call| call.request_id.is_some() || call.progress_token.is_some());
    }
}

/// The call for which the client is asked.
fn origin(message: &JsonRpcRequest<ServerRequest>) -> Option<RequestId> {
    let OriginatingRequestId(origin) = message.request.extensions().get()?;
    Some(origin.into())
}

#[cfg(test)]
mod tests;
