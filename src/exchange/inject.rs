//! Delivers cancellations to the server.

use std::{future::pending, sync::Arc, time::Duration};

use tracing::{Instrument as _, Span};

use super::state::{Exchange, PendingCancel};
use crate::{
    call::{CallId, Key},
    cancel::{CancelError, Canceller, Injection},
    observe::Event,
    timer::{Migration, migrating_timeout},
};

/// Maximum time for the server to accept a cancellation, including retries.
///
/// Without this limit, a session whose client is not reading could delay a cancellation indefinitely.
pub(crate) const INJECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Delays before the second and third attempts to deliver a cancellation.
///
/// Often long enough for a server that is restarting or shedding load to recover, and short enough for all three attempts to fit in
/// [`INJECTION_TIMEOUT`].
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// A cancellation being delivered. When dropped, it reports the error unless the delivery has succeeded.
struct Delivery {
    exchange: Arc<Exchange>,
    id: CallId,
    result: Result<(), CancelError>,
}

// === impl Exchange ===

impl Exchange {
    /// Spawns a task in `span` that runs the injection and reports a failure.
    ///
    /// If the server temporarily refuses the cancellation, it is retried up to twice.
    pub(super) fn inject(self: &Arc<Self>, id: CallId, injection: Injection, span: Span) {
        let canceller = self.state().canceller.clone();
        self.release_canceller();
        let delivery = Delivery {
            exchange: self.clone(),
            id,
            result: Err(CancelError::UNDELIVERED),
        };
        let task = async move {
            let injection = delivery.exchange.run_injection(id, canceller, injection);
            let result = migrating_timeout(INJECTION_TIMEOUT, injection).await;
            delivery.end(result.unwrap_or(Err(CancelError::TIMED_OUT)));
        };
        let registry = &self.shared.registry;
        registry
            .timer()
            .spawn(Migration::Always, task.instrument(span));
    }

    /// Runs the injection and retries it if it fails temporarily.
    ///
    /// Sends nothing and fails if another call has since taken the request id.
    async fn run_injection(
        &self,
        id: CallId,
        canceller: Option<Arc<dyn Canceller>>,
        mut injection: Injection,
    ) -> Result<(), CancelError> {
        let key = canceller
            .as_ref()
            .and_then(|canceller| self.call(id)?.key(canceller.scope()));
        let mut delays = RETRY_DELAYS.iter();
        loop {
            if self.is_reused(id, key.as_ref()).await {
                return Err(CancelError::REUSED);
            }
            let result = injection.await;
            let is_transient = result.as_ref().is_err_and(CancelError::is_transient);
            let Some(delay) = delays.next().filter(|_| is_transient) else {
                return result;
            };
            let Some(repeated) = self.retry_injection(id, canceller.as_ref()) else {
                return result;
            };
            let _ = migrating_timeout(*delay, pending::<()>()).await;
            injection = repeated;
        }
    }

    /// Creates another injection for the same cancellation.
    ///
    /// Returns `None` if no canceller is known or the call was not cancelled.
    fn retry_injection(
        &self,
        id: CallId,
        canceller: Option<&Arc<dyn Canceller>>,
    ) -> Option<Injection> {
        Some(
            canceller?
                .clone()
                .cancel(self.call(id)?, self.signal.reason()?),
        )
    }

    /// Returns `true` if another call has reused this call's id and would be cancelled instead.
    ///
    /// Waits until the other call has been accepted or has ended, because if it is refused, the cancellation must still be sent. A call
    /// that is itself waiting for this cancellation is ignored.
    async fn is_reused(&self, id: CallId, key: Option<&Key>) -> bool {
        let Some(key) = key else {
            return false;
        };
        let registry = &self.shared.registry;
        while let Some((other, exchange)) = registry
            .find_including_unaccepted(key)
            .filter(|(other, _)| *other != id)
        {
            exchange.wait_until_accepted_or_ended(other).await;
            if exchange.pending_cancel() == PendingCancel::Awaited {
                return false;
            }
            if exchange.is_in_flight(other) {
                return true;
            }
        }
        false
    }

    /// Drops the canceller if it replays cancellations. Called when the exchange no longer needs it.
    ///
    /// A replaying canceller owns the request's head, its extensions and a clone of the inner service. It must not live as long as the
    /// exchange, which a handler can keep alive forever by holding on to a `CallToken`.
    pub(super) fn release_canceller(&self) {
        let canceller = {
            let mut state = self.state();
            if state.is_bound() {
                // Keep it: a session manager is shared by all of its calls.
                return;
            }
            state.canceller.take()
        };
        drop(canceller);
    }

    fn report_cancel_failure(&self, id: CallId, error: &CancelError) {
        if let Some(call) = self.call(id) {
            self.report(&Event::CancelFailed { call, error });
        }
    }
}

// === impl Delivery ===

impl Delivery {
    fn end(mut self, result: Result<(), CancelError>) {
        self.result = result;
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Err(error) = &self.result {
            self.exchange.report_cancel_failure(self.id, error);
        }
    }
}
