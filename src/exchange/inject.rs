//! A cancellation on its way to the server.

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
/// A session whose client is not reading could delay a cancellation indefinitely.
pub(crate) const INJECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Delays before the second and the third attempt at a cancellation.
///
/// By then, a server that is restarting or shedding load often accepts the cancellation, and all three attempts fit in
/// [`INJECTION_TIMEOUT`].
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// The delivery of a cancellation. When dropped, it reports the error unless the cancellation has been delivered.
struct Delivery {
    exchange: Arc<Exchange>,
    id: CallId,
    result: Result<(), CancelError>,
}

// === impl Exchange ===

impl Exchange {
    /// Spawns the injection in a span and reports a failure. If the server temporarily refuses the cancellation, it is retried up to twice.
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

    /// Runs the injection, and retries it if it fails temporarily.
    ///
    /// Sends nothing and fails if another call has the request id by now.
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

    /// Returns a new injection for the cancellation. Returns `None` if no canceller is known or the call was not cancelled.
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

    /// Returns `true` if another call has reused this ended call's id and would be hit instead.
    ///
    /// Waits while the other call has not been accepted yet, because the cancellation must still be sent if that call is refused. A call
    /// that is itself waiting for this cancellation does not count.
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

    /// Drops the canceller if it replays cancels. Called when the exchange no longer needs the canceller.
    ///
    /// Such a canceller owns the request's head, its extensions and a clone of the inner service, whereas handlers may keep a
    /// `CallToken`, and with it the exchange, forever.
    pub(super) fn release_canceller(&self) {
        let canceller = {
            let mut state = self.state();
            if state.is_bound() {
                // A session manager is shared by all its calls.
                return;
            }
            state.canceller.take()
        };
        drop(canceller);
    }

    fn report_cancel_failed(&self, id: CallId, error: &CancelError) {
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
            self.exchange.report_cancel_failed(self.id, error);
        }
    }
}
