//! Handles peers' requests while this instance is transferring its sessions.
//!
//! A new call waits until none of its session's calls is in flight. The session is then relinquished, and the call starts on the peer. If
//! the client cancels the call while it is waiting, the call never starts, and since it does not belong to any session yet, this instance
//! answers it directly. Cancellations are reported by the session manager, so by then the application has accepted them, whether a client
//! or a peer sent them.

use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::Request;
use serde_json::Value;
use tokio::{select, sync::Notify};

use super::Router;
use crate::{
    directory::{Directory as _, SessionSnapshot},
    ids::{Record, SessionHash},
    lock::lock,
    refusals::{self, Refusal},
    relay::replayable_request::ReplayableRequest,
    routing::{fields::Fields, request_kind::RequestKind, routed::TransferOutcome},
    shutdown::ShutdownStage,
};

/// Calls waiting for their sessions to be transferred. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct WaitingCalls(Arc<Mutex<Vec<Arc<WaitingCall>>>>);

#[derive(Debug)]
struct WaitingCall {
    session: SessionHash,
    /// The call's JSON-RPC id.
    request: Value,
    cancelled: Notify,
}

/// Keeps a call listed in [`WaitingCalls`] until dropped.
struct WaitingGuard<'a> {
    calls: &'a WaitingCalls,
    call: Arc<WaitingCall>,
}

// === impl Router ===

impl Router {
    /// Decides where to serve a peer's request. For a new call or stream, transfers its session first.
    pub(crate) async fn transfer(&self, request: Request<Body>) -> TransferOutcome {
        let session = Fields::parse(request.headers()).session.map(str::to_owned);
        let mut replayable = ReplayableRequest::new(request);
        let kind = match RequestKind::classify(&mut replayable).await {
            Ok(kind) => kind,
            Err(refusal) => return TransferOutcome::Answered(refusal.into()),
        };
        let (Some(request), Some(id)) = (replayable.into_request(), session) else {
            return TransferOutcome::Answered(Refusal::SessionMoved.into());
        };
        let can_be_claimed = match kind {
            RequestKind::Call(call) => {
                let waiting = self.waiting_calls.add(SessionHash::of(&id), call);
                select! {
                    biased;
                    () = waiting.call.cancelled.notified() => {
                        let cancelled = refusals::cancelled(&waiting.call.request);
                        return TransferOutcome::Answered(cancelled);
                    }
                    can_be_claimed = self.transfer_when_idle(&id) => can_be_claimed,
                }
            }
            RequestKind::Stream => {
                let can_be_claimed = self.can_be_claimed(&id).await;
                if can_be_claimed {
                    self.shutdown.try_transfer(&id);
                }
                can_be_claimed
            }
            RequestKind::Other => true,
        };
        if !can_be_claimed {
            return TransferOutcome::Answered(self.reject(Refusal::OwnerUnknown));
        }
        match self.presence(&id) {
            Some(presence) => TransferOutcome::ServedHere(request, presence),
            None => TransferOutcome::Moved(request),
        }
    }

    /// Transfers a session once none of its calls is in flight. Returns `false` if no peer can claim it.
    async fn transfer_when_idle(&self, id: &str) -> bool {
        self.shutdown.wait_until_idle(id).await;
        let can_be_claimed = self.can_be_claimed(id).await;
        if can_be_claimed {
            self.shutdown.transfer(id).await;
        }
        can_be_claimed
    }

    /// Relinquishes a session whose gate was closed while it was idle.
    ///
    /// This is called when a peer is about to claim the session. It does nothing if the gate is open, if no peer can claim the session, or
    /// if sessions are not being transferred.
    pub(crate) async fn relinquish_idle(&self, id: &str) {
        let is_transferring = self.shutdown.stage() == ShutdownStage::Transferring;
        let is_closed = || self.sessions.gate(id).is_some_and(|gate| gate.is_closed());
        if is_transferring && is_closed() && self.can_be_claimed(id).await {
            self.shutdown.relinquish(SessionHash::of(id));
        }
    }

    /// Returns `true` if a peer can claim a session.
    ///
    /// A peer can claim the session if it is not open here, or if its record specifies this instance as the owner. Otherwise, the session
    /// is rewritten.
    async fn can_be_claimed(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        if !self.sessions.is_open(session) {
            return true;
        }
        let snapshot = self.directory.look_up(session).await;
        let is_own = |snapshot: SessionSnapshot| matches!(snapshot.record, Some(Record::Owned(ownership)) if ownership.owner == self.this_instance);
        let is_recorded = snapshot.is_ok_and(is_own);
        if !is_recorded {
            self.sessions.write_again(session);
        }
        is_recorded
    }
}

// === impl WaitingCalls ===

impl WaitingCalls {
    fn add(&self, session: SessionHash, request: Value) -> WaitingGuard<'_> {
        let call = Arc::new(WaitingCall {
            session,
            request,
            cancelled: Notify::new(),
        });
        lock(&self.0).push(call.clone());
        WaitingGuard { calls: self, call }
    }

    /// Cancels a session's waiting calls with the JSON-RPC id `request`.
    ///
    /// The application must have accepted the cancellation.
    pub(crate) fn cancel(&self, session: SessionHash, request: &Value) {
        for call in lock(&self.0).iter() {
            if call.session == session && call.request == *request {
                call.cancelled.notify_one();
            }
        }
    }
}

// === impl WaitingGuard ===

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        let mut calls = lock(&self.calls.0);
        if let Some(index) = calls.iter().position(|call| Arc::ptr_eq(call, &self.call)) {
            calls.swap_remove(index);
        }
    }
}
