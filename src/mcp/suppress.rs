//! Suppresses messages that a session's cancelled calls are still sending.
//!
//! rmcp would send them on the session's standalone stream (`cancelled_call` in ARCHITECTURE.md, Workarounds), so both the
//! session's transport and its streams drop them.
//!
//! A handler still awaiting a reply from the client when its call is cancelled would wait forever, so the transport sends it an
//! error in place of the reply.
//!
//! 1. Only `send` records requests to the client, and it cannot run while a `receive` is pending, because both take `&mut self`.
//!    A `receive` that finds no request therefore does not have to be woken for a new request.
//! 2. Every request to the client is either refused or answered, because a single lock covers both checking for a cancelled call
//!    and recording the request.

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

use super::{answered_id, error_for, requests_to_client::PendingRequestsToClient};
use crate::call::{CallInfo, RequestId};

use crate::lock::lock;

/// Maximum number of cancelled calls whose messages a session suppresses.
///
/// Beyond that, the oldest call's messages are delivered again. This is also the maximum number of untracked calls that a session
/// can run at once: if there are ever more, the session never suppresses anything again.
const MAX_SUPPRESSED: usize = 256;

/// A session's cancelled calls and the requests that its calls have made to the client.
#[derive(Debug, Default)]
pub(super) struct Suppressed {
    /// Whether `state` contains any calls or requests to the client. If not, only requests to the client take the lock.
    active: AtomicBool,
    state: Mutex<SuppressionState>,
    receiver: AtomicWaker,
}

#[derive(Debug, Default)]
struct SuppressionState {
    hasher: RandomState,
    cancelled: VecDeque<HashedIds>,
    /// Untracked in-flight calls. Messages carrying their ids are delivered.
    untracked: VecDeque<HashedIds>,
    /// Whether more than [`MAX_SUPPRESSED`] untracked calls have ever run at once. If so, messages can no longer be attributed to
    /// calls.
    has_overflowed: bool,
    requests_to_client: PendingRequestsToClient,
}

/// Keyed hashes of a cancelled or untracked call's ids.
///
/// Only hashes are stored, because a client can choose an id of many MiB, and a session outlives its calls.
#[derive(Debug)]
struct HashedIds {
    /// `None` if another call has reused the id.
    request_id: Option<u64>,
    /// `None` if the call has no token or another call has reused it.
    progress_token: Option<u64>,
}

/// What the transport should do with a message from a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendDecision {
    Send,
    Drop,
    /// Drop it with an error. Its sender would otherwise wait for a reply that can never arrive.
    Refuse,
}

// === impl Suppressed ===

impl Suppressed {
    /// Suppresses a call's messages and abandons its requests to the client.
    pub(super) fn suppress(&self, call: &CallInfo) {
        self.update(|state| {
            if state.cancelled.len() == MAX_SUPPRESSED {
                state.cancelled.pop_front();
            }
            let cancelled = HashedIds::new(&state.hasher, call);
            state.cancelled.push_back(cancelled);
            state.requests_to_client.abandon(call.request_id());
        });
        self.receiver.wake();
    }

    /// Lets a new call's messages through, even if it reuses a cancelled call's ids.
    pub(super) fn resume_delivery(&self, call: &CallInfo) {
        if !self.is_active() {
            return;
        }
        self.update(|state| {
            let new = HashedIds::new(&state.hasher, call);
            new.claim_ids_from(&mut state.cancelled);
            new.claim_ids_from(&mut state.untracked);
        });
    }

    /// Lets a new untracked call's messages through.
    ///
    /// They keep being delivered even if an older call with the same ids is cancelled later.
    #[cold]
    pub(super) fn resume_delivery_untracked(&self, call: &CallInfo) {
        self.update(|state| {
            let new = HashedIds::new(&state.hasher, call);
            new.claim_ids_from(&mut state.cancelled);
            new.claim_ids_from(&mut state.untracked);
            state.has_overflowed |= state.untracked.len() == MAX_SUPPRESSED;
            if !state.has_overflowed {
                state.untracked.push_back(new);
            }
        });
    }

    /// Removes an untracked call that has been refused or cancelled.
    ///
    /// Other calls are removed once they are answered, but a refused or cancelled call will never be answered.
    #[cold]
    pub(super) fn forget_untracked(&self, request: &RequestId) {
        if self.is_active() {
            self.update(|state| state.forget_untracked(request));
        }
    }

    /// Stops suppressing progress messages carrying a cancelled call's token.
    ///
    /// Called when another call has reused the token.
    #[cold]
    pub(super) fn resume_token_delivery(&self, call: &CallInfo) {
        self.update(|state| {
            let mut token = HashedIds::new(&state.hasher, call);
            token.request_id = None;
            token.claim_ids_from(&mut state.cancelled);
        });
    }

    /// Decides what to do with a message to the client and records it if it is to be sent.
    pub(super) fn decide(&self, message: &ServerJsonRpcMessage) -> SendDecision {
        let is_request = matches!(message, ServerJsonRpcMessage::Request(_));
        if !is_request && !self.is_active() {
            return SendDecision::Send;
        }
        self.update(|state| match (state.is_suppressed(message), is_request) {
            (true, true) => SendDecision::Refuse,
            (true, false) => SendDecision::Drop,
            (false, _) => {
                state.record(message);
                SendDecision::Send
            }
        })
    }

    /// Returns `true` if a message from a stream belongs to a cancelled call.
    ///
    /// This is needed because the message might have been sent before the call was cancelled.
    pub(super) fn is_suppressed(&self, message: &ServerJsonRpcMessage) -> bool {
        self.is_active() && self.state().is_suppressed(message)
    }

    /// Removes the request to the client that `message` answers, if it is an answer.
    pub(super) fn on_received(&self, message: &RxJsonRpcMessage<RoleServer>) {
        if let Some(id) = answered_id(message)
            && self.is_active()
        {
            self.update(|state| state.requests_to_client.remove(id));
        }
    }

    /// Returns an error that replaces the client's reply, if a request has been abandoned.
    #[cold]
    pub(super) fn error_reply(&self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let id = self.update(|state| state.requests_to_client.next_abandoned())?;
        let error = error_for(None);
        Some(JsonRpcMessage::error(error, Some(id)))
    }

    /// Registers the waker to wake when [`error_reply`](Self::error_reply) might return an error.
    pub(super) fn register_waker(&self, waker: &Waker) {
        self.receiver.register(waker);
    }

    /// Returns `true` if there might be messages to suppress or requests to answer.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    #[cold]
    fn update<T>(&self, change: impl FnOnce(&mut SuppressionState) -> T) -> T {
        let mut state = self.state();
        let output = change(&mut state);
        let SuppressionState {
            cancelled,
            untracked,
            requests_to_client,
            ..
        } = &*state;
        let is_empty =
            cancelled.is_empty() && untracked.is_empty() && requests_to_client.is_empty();
        self.active.store(!is_empty, Ordering::Release);
        output
    }

    fn state(&self) -> MutexGuard<'_, SuppressionState> {
        lock(&self.state)
    }
}

// === impl SuppressionState ===

impl SuppressionState {
    /// Returns `true` if a message belongs to a cancelled call.
    fn is_suppressed(&self, message: &ServerJsonRpcMessage) -> bool {
        match message {
            ServerJsonRpcMessage::Request(message) => {
                origin(message).is_some_and(|origin| self.is_cancelled(&origin))
            }
            ServerJsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::ProgressNotification(progress),
                ..
            }) => {
                let token = RequestId::from(&progress.params.progress_token.0);
                let token = Some(self.hasher.hash_one(token));
                self.matches_cancelled(|call| call.progress_token == token)
            }
            other => answered_id(other).is_some_and(|id| self.is_cancelled(&id.into())),
        }
    }

    fn is_cancelled(&self, id: &RequestId) -> bool {
        let id = Some(self.hasher.hash_one(id));
        self.matches_cancelled(|call| call.request_id == id)
    }

    fn matches_cancelled(&self, matches: impl Fn(&HashedIds) -> bool) -> bool {
        self.cancelled.iter().any(&matches)
            && !self.has_overflowed
            && !self.untracked.iter().any(&matches)
    }

    /// Records a message being sent to the client: a request, its cancellation, or an answer.
    fn record(&mut self, message: &ServerJsonRpcMessage) {
        match message {
            ServerJsonRpcMessage::Request(message) => {
                if let Some(origin) = origin(message) {
                    self.requests_to_client.insert(message.id.clone(), origin);
                }
            }
            ServerJsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::CancelledNotification(cancelled),
                ..
            }) => {
                if let Some(id) = &cancelled.params.request_id {
                    self.requests_to_client.remove(id);
                }
            }
            other => {
                if let Some(id) = answered_id(other) {
                    let id = id.into();
                    self.requests_to_client.remove_for_call(&id);
                    self.forget_untracked(&id);
                }
            }
        }
    }

    fn forget_untracked(&mut self, request: &RequestId) {
        if !self.untracked.is_empty() {
            let id = Some(self.hasher.hash_one(request));
            self.untracked.retain(|call| call.request_id != id);
        }
    }
}

// === impl HashedIds ===

impl HashedIds {
    fn new(hasher: &impl BuildHasher, call: &CallInfo) -> Self {
        let hash = |id: &RequestId| hasher.hash_one(id);
        Self {
            request_id: Some(hash(call.request_id())),
            progress_token: call.progress_token().map(hash),
        }
    }

    /// Takes this call's ids away from any older calls that share them.
    fn claim_ids_from(&self, calls: &mut VecDeque<Self>) {
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

/// Returns the id of the call that made a request to the client, if rmcp has recorded it.
fn origin(message: &JsonRpcRequest<ServerRequest>) -> Option<RequestId> {
    let OriginatingRequestId(origin) = message.request.extensions().get()?;
    Some(origin.into())
}

#[cfg(test)]
mod tests;
