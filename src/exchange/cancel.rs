//! Cancels calls and determines which sides are notified.
//!
//! [`Exchange::begin_cancel`] is the only function that cancels calls. It does the following, in this order:
//!
//! 1. ends the call in its session;
//! 2. fires the call's token;
//! 3. reports that the call has ended;
//! 4. sends the error on the open streams, if the client is to be notified;
//! 5. returns the injection that notifies the server, if there is one to send now.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::{sync::mpsc, time::Instant};

use super::state::{Dispatch, Exchange};
use crate::{
    call::{CallId, CancelReason, Outcome},
    cancel::{CancelGuard, Canceller, Injection},
    observe::Event,
    registry::{Completion, ExpiryToken, Finished, RetainedOutcome},
    timer::migrating_timeout,
};

/// Maximum time for a closing session to accept a cancellation.
///
/// Waiting any longer would be pointless if the session has ended on its own, because it never accepts anything and is about to be closed
/// anyway.
pub(crate) const CLOSE_CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// A cancellation: its reason, when it applies, and which sides it notifies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cancel {
    reason: CancelReason,
    condition: Condition,
    notified: NotifiedSides,
}

/// The state a call must be in for a cancellation to end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Condition {
    /// The call is in flight, attached or not.
    InFlight,
    /// The call is detached, no resume is pending, and the call is not marked as maybe resumed.
    Detached,
    /// The call's grace period has expired, and its client has not started to resume it since.
    ///
    /// If there is a token, it must belong to the current expiry.
    Expired(Option<ExpiryToken>),
}

/// The sides to notify of a cancellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NotifiedSides {
    Server,
    ServerAndClient,
    /// The server has already received the cancellation or closed the session.
    Neither,
}

/// A call that has just been cancelled, but whose server may still have to be notified.
struct JustCancelled {
    finished: Finished,
    /// Acquired before the call ended, so that closing the session waits for the injection.
    guard: Option<CancelGuard>,
}

// === impl Cancel ===

impl Cancel {
    /// Creates a cancellation for a call, attached or not, that does not run as a task.
    ///
    /// If the client is connected, it receives the error.
    pub(crate) fn now(reason: CancelReason) -> Self {
        Self {
            reason,
            condition: Condition::InFlight,
            notified: NotifiedSides::ServerAndClient,
        }
    }

    /// Creates a cancellation for a call, attached or not, whose session is about to be closed.
    pub(super) fn before_close() -> Self {
        Self {
            reason: CancelReason::SessionClosed,
            condition: Condition::InFlight,
            notified: NotifiedSides::Server,
        }
    }

    /// Creates a cancellation for a call, attached or not, whose answer a gateway has lost.
    ///
    /// The client receives an error from the gateway itself.
    pub(super) fn lost() -> Self {
        Self {
            reason: CancelReason::ResponseDropped,
            ..Self::before_close()
        }
    }

    /// Creates a cancellation that the server already knows about.
    ///
    /// The server has either received the cancellation itself or closed the session. The call may be attached or not.
    pub(crate) fn external(reason: CancelReason) -> Self {
        Self {
            reason,
            condition: Condition::InFlight,
            notified: NotifiedSides::Neither,
        }
    }

    /// Creates a cancellation for a call whose grace period has expired.
    pub(super) fn expired(reason: CancelReason) -> Self {
        Self {
            reason,
            condition: Condition::Expired(None),
            notified: NotifiedSides::Server,
        }
    }

    /// Creates a cancellation confirmed for this expiry of the call's grace period.
    pub(super) fn confirmed(reason: CancelReason, expiry: ExpiryToken) -> Self {
        Self {
            condition: Condition::Expired(Some(expiry)),
            ..Self::expired(reason)
        }
    }

    /// Creates a cancellation for a detached call whose client has resent it.
    pub(super) fn superseded() -> Self {
        Self {
            reason: CancelReason::Superseded,
            condition: Condition::Detached,
            notified: NotifiedSides::Server,
        }
    }

    /// Returns the call's outcome: `notified_outcome`, unless neither side is notified.
    fn outcome(self, notified_outcome: Outcome) -> Outcome {
        match (self.notified, self.reason) {
            (NotifiedSides::Neither, CancelReason::ClientCancelled) => Outcome::ClientCancelled,
            (NotifiedSides::Neither, other) => Outcome::Cancelled(other),
            (NotifiedSides::Server | NotifiedSides::ServerAndClient, _) => notified_outcome,
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// Cancels a call and spawns a task to notify its server.
    ///
    /// Returns `false` if the call does not meet the condition, or if `cancel` is a [`Cancel::now`] and the call runs as a task.
    pub(crate) fn cancel(self: &Arc<Self>, id: CallId, cancel: Cancel) -> bool {
        self.cancel_and_report(id, cancel, None)
    }

    /// Like [`cancel`](Self::cancel), but also reports `detached`.
    ///
    /// This event is reported after the token has fired, or immediately if the call is not cancelled.
    pub(super) fn cancel_and_report(
        self: &Arc<Self>,
        id: CallId,
        cancel: Cancel,
        detached: Option<&Event<'_>>,
    ) -> bool {
        let span = self.span();
        let cancelled = self.begin_cancel(id, cancel, detached);
        let is_cancelled = cancelled.is_some();
        if let Some(injection) = cancelled.flatten() {
            self.inject(id, injection, span);
        }
        is_cancelled
    }

    /// Cancels a call because the server is shutting down. Returns `false` if the call has ended or runs as a task.
    ///
    /// If there is an injection, it holds a clone of `delivered` until its first attempt has succeeded or failed.
    pub(crate) fn cancel_at_shutdown(
        self: &Arc<Self>,
        id: CallId,
        delivered: &mpsc::Sender<()>,
    ) -> bool {
        let span = self.span();
        let cancelled = self.begin_cancel(id, Cancel::now(CancelReason::ShuttingDown), None);
        let is_cancelled = cancelled.is_some();
        if let Some(injection) = cancelled.flatten() {
            let delivered = delivered.clone();
            let delivering = async move {
                let result = injection.await;
                drop(delivered);
                result
            };
            self.inject(id, Box::pin(delivering), span);
        }
        is_cancelled
    }

    /// Cancels the calls of a session that is being closed.
    ///
    /// Then waits up to [`CLOSE_CANCEL_TIMEOUT`] for the server to accept the cancellations.
    pub(crate) async fn cancel_before_close(calls: Vec<(CallId, Arc<Self>)>) {
        let mut injections = Vec::new();
        for (id, exchange) in calls {
            let cancelled = exchange.begin_cancel(id, Cancel::before_close(), None);
            let injection = cancelled.flatten();
            injections.extend(
                injection.map(|injection| migrating_timeout(CLOSE_CANCEL_TIMEOUT, injection)),
            );
        }
        // Ignore the results, because the session is about to be closed either way. A session that has ended on its own does not accept
        // messages, but it has already stopped its handlers.
        join_all(injections).await;
    }

    /// Cancels a call and returns the injection that will notify its server.
    ///
    /// Returns `None` if the call does not meet the condition, or if a [`Cancel::now`] would end a task. Returns `Some(None)` if the call
    /// has been cancelled but there is no injection to send now. `detached` is reported either way.
    pub(crate) fn begin_cancel(
        self: &Arc<Self>,
        id: CallId,
        cancel: Cancel,
        detached: Option<&Event<'_>>,
    ) -> Option<Option<Injection>> {
        let cancelled = self.end_as_cancelled(id, cancel);
        let cancelled = cancelled
            .map(|cancelled| (self.apply_cancel(id, cancel, cancelled.finished), cancelled));
        if let Some(detached) = detached {
            self.report(detached);
        }
        let (outcome, cancelled) = cancelled?;
        self.report_end(id, outcome, cancelled.finished);
        let injection = match cancel.notified {
            NotifiedSides::Server => self.injection(id, cancel.reason, cancelled),
            NotifiedSides::ServerAndClient => {
                self.send_cancel_error(id, cancel.reason);
                self.injection(id, cancel.reason, cancelled)
            }
            NotifiedSides::Neither => {
                // The server may have received the cancellation before the call itself. If so, resend it after the call.
                if cancel.reason == CancelReason::ClientCancelled {
                    self.defer_cancel(cancel.reason, cancelled);
                }
                self.release_canceller();
                None
            }
        };
        Some(injection)
    }

    /// Ends a call in its session, which retains it as cancelled.
    fn end_as_cancelled(&self, id: CallId, cancel: Cancel) -> Option<JustCancelled> {
        let (call, now) = (self.call(id)?, Instant::now());
        if cancel.notified == NotifiedSides::ServerAndClient && call.is_task() {
            return None;
        }
        let canceller = self.state().canceller.clone();
        // No session manager has bound the call yet, so it has no key. If a session manager binds it later, the cancellation is sent once
        // the server has accepted the request.
        let may_be_bound_later = canceller.is_none() && call.session().is_some();
        let guard = canceller.and_then(|canceller| canceller.announce_cancel(call));
        let completion = Completion {
            outcome: RetainedOutcome::Cancelled(call.request_id().clone(), cancel.reason),
            weight: 0,
            at: now,
            until: self.retain_until(call, now),
        };
        let mut finished = self.with_session(|session| match cancel.condition {
            Condition::InFlight => session.finish(id, Some(completion)),
            Condition::Detached => session.finish_detached(id, completion),
            Condition::Expired(Some(expiry)) if session.expiry(id) != Some(expiry) => None,
            Condition::Expired(_) => session.finish_due(id, completion),
        })??;
        finished.may_cancel_server |= may_be_bound_later;
        Some(JustCancelled { finished, guard })
    }

    /// Fires the token of a call that has just been cancelled and returns the call's outcome.
    fn apply_cancel(&self, id: CallId, cancel: Cancel, finished: Finished) -> Outcome {
        let has_recipient = self.has_cancel_recipient(id, finished);
        self.notify_changed();
        let has_older = self.mark_call_ended(false);
        self.fire(cancel.reason);
        let may_be_attached = cancel.condition == Condition::InFlight;
        if has_older || (may_be_attached && cancel.notified != NotifiedSides::ServerAndClient) {
            self.register_orphaned_streams();
        }
        cancel.outcome(if has_recipient {
            Outcome::Cancelled(cancel.reason)
        } else {
            Outcome::Abandoned(cancel.reason)
        })
    }

    /// Returns `true` if the cancellation reaches code that can stop the call's work.
    ///
    /// Either some code holds the call's token, or the server can be notified: it receives an injection or, if its protocol revision
    /// defines a closed stream as a cancellation, notices that the stream was closed.
    fn has_cancel_recipient(&self, id: CallId, finished: Finished) -> bool {
        let Some(call) = self.call(id) else {
            return false;
        };
        if call.is_cancelled_on_disconnect() || self.signal.is_observed() {
            return true;
        }
        let state = self.state();
        match state.canceller {
            Some(_) => finished.may_cancel_server,
            // No session manager has bound the call yet. If one still does, it will send the cancellation, but none will once there is a
            // response head.
            None => call.session().is_some() && !state.has_head,
        }
    }

    /// Creates a cancelled call's injection, or returns `None` if there is none to send now.
    fn injection(
        &self,
        id: CallId,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<Injection> {
        // The guard in `cancelled` keeps the cancellation pending until the injection exists.
        let (cancelled, canceller) = self.defer_cancel(reason, cancelled)?;
        let Some(canceller) = canceller.filter(|_| cancelled.finished.may_cancel_server) else {
            self.release_canceller();
            return None;
        };
        Some(canceller.cancel(self.call(id)?, reason))
    }

    /// Defers a cancellation while the call is being dispatched. Otherwise returns it, unless the dispatch has already sent it.
    ///
    /// All of this happens under a single lock, because a session manager may bind the call concurrently.
    fn defer_cancel(
        &self,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<(JustCancelled, Option<Arc<dyn Canceller>>)> {
        let mut state = self.state();
        match &mut state.dispatch {
            Dispatch::InProgress(attempts) => {
                // `rebind` may already have deferred one.
                if cancelled.finished.may_cancel_server && attempts.deferred_cancel.is_none() {
                    attempts.deferred_cancel = Some((reason, cancelled.guard));
                }
                None
            }
            Dispatch::Done { is_cancelled: true } => None,
            Dispatch::Done {
                is_cancelled: false,
            }
            | Dispatch::NotBound => Some((cancelled, state.canceller.clone())),
        }
    }
}
