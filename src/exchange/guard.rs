//! Guards that report drops and panics to an exchange.

use std::{fmt, sync::Arc};

use super::{state::Exchange, tap::Tap};
use crate::call::DetachCause;

/// Reports that the response was dropped, unless the exchange has already ended.
///
/// It must be the first field of whatever it guards, so that the token fires before the inner destructors run.
pub(crate) struct Guard {
    exchange: Option<Arc<Exchange>>,
    // Boxed, because guards are moved often and most have no tap.
    tap: Option<Box<Tap>>,
}

/// Reports a panic that occurs while the inner service is being called or polled.
///
/// It does so from `Drop`, during unwinding, because the runtime might not drop the future until it has caught the panic, by which
/// time the cause can no longer be determined.
pub(crate) struct PollGuard<'a>(&'a Arc<Exchange>);

// === impl Guard ===

impl Guard {
    pub(crate) fn new(exchange: Arc<Exchange>) -> Self {
        Self {
            exchange: Some(exchange),
            tap: None,
        }
    }

    /// Returns an inert guard for a request that another layer is already tracking.
    pub(crate) fn inert() -> Self {
        Self {
            exchange: None,
            tap: None,
        }
    }

    pub(crate) fn exchange(&self) -> Option<&Arc<Exchange>> {
        self.exchange.as_ref()
    }

    pub(crate) fn poll_guard(&self) -> Option<PollGuard<'_>> {
        self.exchange.as_ref().map(PollGuard)
    }

    pub(crate) fn set_tap(&mut self, tap: Box<Tap>) {
        self.tap = Some(tap);
    }

    /// Returns the tap, or `None` if the body does not need to be read.
    pub(crate) fn tap(&mut self) -> Option<&mut Tap> {
        self.tap.as_deref_mut()
    }

    /// Reports that the client has received the complete response.
    pub(crate) fn complete(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            exchange.complete(self.tap.take());
        }
    }

    /// Reports that the inner service has returned an error instead of a response.
    pub(crate) fn fail(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            exchange.fail();
        }
    }

    /// Reports that the rest of the response will not be read.
    pub(crate) fn report_dropped(&mut self, cause: DetachCause) {
        if let Some(exchange) = self.exchange.take() {
            exchange.on_dropped(cause, self.tap.take());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.report_dropped(DetachCause::Disconnected);
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guard").field(&self.exchange).finish()
    }
}

// === impl PollGuard ===

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.on_dropped(DetachCause::ServicePanicked, None);
        }
    }
}
