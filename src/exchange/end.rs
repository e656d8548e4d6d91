//! How a call ends: answered, cancelled, or let go.

use std::{any::Any, sync::Arc, time::Duration};
#[cfg(feature = "rmcp")]
use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{Exchange, Phase};
#[cfg(feature = "rmcp")]
use crate::registry::{FIRST, SessionKey};
use crate::{
    call::{CallId, CallInfo, CancelReason, Outcome},
    cancel::{CancelError, Injection},
    layer::Retain,
    observe::Event,
    policy::{Grace, Verdict},
    registry::{Answer, Detached, End, Ended, Finished, Generation, UNSEEN_FOR, Wait},
};

/// How long an injected cancel may take to be accepted: 10 s. A session whose client does not read may
/// hold it back, and it must not be held for ever.
const INJECTION_LIMIT: Duration = Duration::from_secs(10);

/// The least that an ended call is remembered for its client: 60 s, which is also how long rmcp means to keep
/// the events of a completed stream.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// How long a resume waits for an answer that it has overtaken: 1 s. It takes a poll of the reader, or until
/// the server notices that the old connection is gone.
#[cfg(feature = "rmcp")]
const ANSWER_UNDER_WAY: Duration = Duration::from_secs(1);

/// One generation of a call: whoever has it tells when that stream has gone.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) id: CallId,
    pub(crate) generation: Generation,
}

/// How a stream of a call came to its end without the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// Nobody reads it any more.
    Stream(CancelReason),
    /// The server ended it. Its client was told to come back.
    ByServer,
}

/// A call that is cancelled, and what has yet to be told to the server.
pub(crate) struct Cancelled {
    injection: Option<Injection>,
}

// === impl Attachment ===

impl Attachment {
    /// Says that the stream has gone. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(&self, gone: Gone, barren: bool) {
        if let Some(call) = self.exchange.call(self.id) {
            self.exchange.let_go(call, self.generation, gone, barren);
        }
    }

    /// Says that nobody reads the stream, because its client has gone or because something inside let
    /// go of it.
    #[cfg(feature = "rmcp")]
    pub(crate) fn drop_stream(&self) {
        let client_left =
            self.generation != FIRST || self.exchange.state().phase == Phase::Abandoned;
        let reason = match client_left {
            true => CancelReason::ClientDisconnected,
            // Unwinding comes through here before it comes to the exchange's guard.
            false if std::thread::panicking() => CancelReason::ServicePanicked,
            false => CancelReason::ResponseDropped,
        };
        self.detach(Gone::Stream(reason), false);
    }
}

// === impl Exchange ===

impl Exchange {
    /// A stream of a call has gone without its answer.
    pub(super) fn let_go(
        self: &Arc<Self>,
        call: &CallInfo,
        generation: Generation,
        gone: Gone,
        barren: bool,
    ) {
        let now = Instant::now();
        let going = self.going(gone == Gone::ByServer);
        let (grace, deadline) = match call.policy().grace.verdict(call, going) {
            Verdict::CancelNow => (Some(Duration::ZERO), Some(now)),
            Verdict::CancelAfter(grace) => (Some(grace), now.checked_add(grace)),
            Verdict::RunOn => (None, None),
        };
        let wait = match deadline {
            Some(deadline) => Wait::Until {
                deadline,
                retry: going.retry.unwrap_or_default(),
            },
            None if self.is_bound() && gone != Gone::ByServer => Wait::ForItsEnd,
            None if call.session().is_some() && (going.replayable || !going.by_server) => {
                Wait::Unseen(now + UNSEEN_FOR)
            }
            // Nobody can come back for it, and its stream was all that was to be seen of it.
            None => return self.finish(call.id(), Outcome::Unknown),
        };
        let registry = &self.instance.registry;
        match registry.detach(call.id(), generation, wait, barren, now) {
            Detached::Stale => {}
            Detached::Waiting => self.instance.report(&Event::Detached { call, grace }),
            Detached::Due => {
                let reason = match gone {
                    Gone::Stream(reason) => reason,
                    Gone::ByServer => CancelReason::Orphaned,
                };
                self.cancel(call.id(), reason);
            }
        }
    }

    /// Cancels a call, unless it has ended (contract 3).
    pub(crate) fn cancel(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let cancelled = self.begin_cancel(id, reason, Outcome::Cancelled(reason));
        if let Some(injection) = cancelled.and_then(|cancelled| cancelled.injection) {
            self.inject(id, injection);
        }
    }

    /// Cancels a call whose server knows already.
    pub(crate) fn cancelled_elsewhere(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let outcome = match reason {
            CancelReason::ClientCancelled => Outcome::ClientCancelled,
            other => Outcome::Cancelled(other),
        };
        self.begin_cancel(id, reason, outcome);
    }

    fn begin_cancel(
        self: &Arc<Self>,
        id: CallId,
        reason: CancelReason,
        outcome: Outcome,
    ) -> Option<Cancelled> {
        let call = self.call(id)?;
        let ended = Ended {
            end: End::Cancelled(call.request_id().clone()),
            weight: 0,
            until: self.remembered_until(call),
        };
        let finished = self.end(id, Some(ended))?;
        // In a batch the token is that of all calls together.
        if self
            .calls()
            .all(|call| !self.instance.registry.is_in_flight(call.id()))
        {
            self.fire(reason);
        }
        self.instance.report(&Event::Ended { call, outcome });
        let canceller = self.state().canceller.clone();
        let canceller = canceller.filter(|_| finished.injectable);
        Some(Cancelled {
            injection: canceller.map(|canceller| canceller.cancel(call, reason)),
        })
    }

    /// Has the injection run elsewhere, and reports if it fails. It is not repeated.
    fn inject(self: &Arc<Self>, id: CallId, injection: Injection) {
        let this = self.clone();
        let injection = async move {
            let result = tokio::time::timeout(INJECTION_LIMIT, injection).await;
            if let Err(error) = result.unwrap_or(Err(CancelError::timed_out())) {
                this.cancel_failed(id, &error);
            }
        };
        if !self.instance.registry.spawn(injection) {
            self.cancel_failed(id, &CancelError::no_runtime());
        }
    }

    fn cancel_failed(&self, id: CallId, error: &CancelError) {
        if let Some(call) = self.call(id) {
            self.instance.report(&Event::CancelFailed { call, error });
        }
    }

    /// Cancels a call of a session that is being closed, and waits until the server took it.
    #[cfg(feature = "rmcp")]
    pub(crate) async fn cancel_before_close(self: Arc<Self>, id: CallId) {
        let reason = CancelReason::SessionClosed;
        let cancelled = self.begin_cancel(id, reason, Outcome::Cancelled(reason));
        if let Some(injection) = cancelled.and_then(|cancelled| cancelled.injection) {
            // A session that died by itself takes no message, and has stopped its handlers. Whatever
            // becomes of this, the session is closed next.
            let _result = tokio::time::timeout(Duration::from_secs(1), injection).await;
        }
    }

    /// Cancels the detached calls of a session that `call` repeats.
    #[cfg(feature = "rmcp")]
    pub(super) fn supersede(&self, session: &SessionKey, call: &CallInfo) {
        for (id, exchange) in self.instance.registry.detached_in(session) {
            if exchange.call(id).is_some_and(|older| call.repeats(older)) {
                exchange.cancel_ahead(id, CancelReason::Superseded);
            }
        }
    }

    /// Cancels a call, with its injection under way before this returns: a message that is sent to the
    /// server next comes after it, unless the server has no room for either.
    #[cfg(feature = "rmcp")]
    fn cancel_ahead(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let cancelled = self.begin_cancel(id, reason, Outcome::Cancelled(reason));
        let Some(mut injection) = cancelled.and_then(|cancelled| cancelled.injection) else {
            return;
        };
        match injection
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) => self.cancel_failed(id, &error),
            Poll::Pending => self.inject(id, injection),
        }
    }

    /// The answer of a call was seen: what to keep of it, and how many bytes that is.
    pub(crate) fn answered(&self, id: CallId, answer: Option<(Arc<dyn Any + Send + Sync>, usize)>) {
        let registry = &self.instance.registry;
        let kept = match self.instance.options.retain {
            Retain::All => true,
            Retain::Detached => registry.is_detached(id),
            Retain::Off => false,
        };
        let ended = answer.filter(|_| kept).and_then(|(content, weight)| {
            let retry = self.retry();
            Some(Ended {
                end: End::Answered(Answer { content, retry }),
                weight,
                until: self.remembered_until(self.call(id)?),
            })
        });
        if self.end(id, ended).is_some() {
            self.report_end(id, Outcome::Completed);
        }
    }

    pub(crate) fn finish(&self, id: CallId, outcome: Outcome) {
        if self.end(id, None).is_some() {
            self.report_end(id, outcome);
        }
    }

    fn end(&self, id: CallId, remember: Option<Ended<Answer>>) -> Option<Finished> {
        let finished = self.instance.registry.finish(id, remember)?;
        #[cfg(feature = "rmcp")]
        self.ended.notify_waiters();
        Some(finished)
    }

    /// Waits until a call has ended, but not for long. Its session manager let go of it already, so its answer
    /// must be on its way through our hands.
    #[cfg(feature = "rmcp")]
    pub(crate) async fn wait_for_answer(&self, id: CallId) {
        let ended = async {
            loop {
                // Listens before it looks.
                let mut notified = pin!(self.ended.notified());
                notified.as_mut().enable();
                if !self.instance.registry.is_in_flight(id) {
                    return;
                }
                notified.await;
            }
        };
        // Whatever becomes of it, the caller looks again.
        let _in_time = tokio::time::timeout(ANSWER_UNDER_WAY, ended).await;
    }

    fn report_end(&self, id: CallId, outcome: Outcome) {
        if let Some(call) = self.call(id) {
            self.instance.report(&Event::Ended { call, outcome });
        }
    }

    fn remembered_until(&self, call: &CallInfo) -> Instant {
        let grace = match call.policy().grace {
            Grace::After(grace) => grace,
            _ => Duration::ZERO,
        };
        let now = Instant::now();
        now.checked_add(grace.max(REMEMBERED_FOR))
            .unwrap_or(now + REMEMBERED_FOR)
    }

    /// The client of a call came back for it, and the session manager took it.
    #[cfg(feature = "rmcp")]
    pub(crate) fn resumed(&self, id: CallId) {
        if let Some(call) = self.call(id) {
            self.instance.report(&Event::Resumed { call });
        }
    }

    pub(super) fn fire(&self, reason: CancelReason) {
        if self.reason.set(reason).is_ok() {
            let token = self.state().token.clone();
            if let Some(token) = token {
                token.cancel();
            }
        }
    }
}
