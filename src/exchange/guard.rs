//! What tells an exchange that nobody waits for the rest of it.

use std::sync::Arc;

use super::Exchange;
use crate::call::CancelReason;

/// Tells the exchange that it was abandoned, unless it is over before the guard drops.
///
/// It must be the first field of what it guards: then the token fires before the inner destructors run.
#[derive(Debug)]
pub(crate) struct Guard(Option<Arc<Exchange>>);

/// Guards one poll of the inner service against a panic. The runtime may drop the future only after
/// it caught the panic, when nothing shows any more why.
pub(crate) struct Polling<'a>(&'a Arc<Exchange>);

// === impl Guard ===

impl Guard {
    pub(crate) fn new(exchange: Arc<Exchange>) -> Self {
        Self(Some(exchange))
    }

    /// The guard of a request that another layer watches already.
    pub(crate) fn inert() -> Self {
        Self(None)
    }

    pub(crate) fn exchange(&self) -> Option<&Arc<Exchange>> {
        self.0.as_ref()
    }

    pub(crate) fn polling(&self) -> Option<Polling<'_>> {
        self.0.as_ref().map(Polling)
    }

    /// The client was told everything.
    pub(crate) fn complete(&mut self) {
        if let Some(exchange) = self.0.take() {
            exchange.complete();
        }
    }

    /// The inner service failed instead of answering.
    pub(crate) fn fail(&mut self) {
        if let Some(exchange) = self.0.take() {
            exchange.fail();
        }
    }

    /// Nobody will read the rest.
    pub(crate) fn abandon(&mut self, reason: CancelReason) {
        if let Some(exchange) = self.0.take() {
            exchange.abandon(reason);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.abandon(CancelReason::ClientDisconnected);
    }
}

// === impl Polling ===

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abandon(CancelReason::ServicePanicked);
        }
    }
}
