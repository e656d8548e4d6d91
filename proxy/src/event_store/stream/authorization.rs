//! Decides which clients may resume a stream, based on the latest accepted credentials.
//!
//! 1. A client with exactly these credentials may resume without a check, unless the server has since refused them.
//! 2. Any other credentials are checked with the server first. During the check, the call must not be cancelled as an orphan.

use std::sync::{Arc, atomic::Ordering};

use http::Request;

use super::Stream;
use crate::event_store::credentials::Credentials;

/// Marks a check of a client's credentials as pending until the guard is dropped.
pub(in crate::event_store) struct PendingCheckGuard(Stream);

// === impl Stream ===

impl Stream {
    /// Returns the credentials that the proxy uses in its own requests for the call, if any.
    pub(in crate::event_store) fn credentials(&self) -> Option<Arc<Credentials>> {
        self.state().credentials.clone()
    }

    /// Returns `true` if a request carries the latest accepted credentials.
    ///
    /// Always returns `false` if the server has since refused them.
    pub(in crate::event_store) fn has_credentials_of<B>(&self, request: &Request<B>) -> bool {
        let state = self.state();
        let known = state.credentials.clone();
        let has_refused_credentials = state.has_refused_credentials;
        drop(state);
        !has_refused_credentials && known.is_some_and(|known| *known == Credentials::of(request))
    }

    /// Records that the server has accepted these credentials.
    pub(in crate::event_store) fn accept_credentials(&self, credentials: Arc<Credentials>) {
        {
            let mut state = self.state();
            state.credentials = Some(credentials);
            state.has_refused_credentials = false;
        }
        self.0.credentials_renewed.notify_waiters();
    }

    /// Records that the server refused these credentials, and waits until it accepts some again.
    ///
    /// Ends the response the client is reading, so that the client resumes, and returns `true` once the server has accepted
    /// credentials again, even if they are unchanged.
    ///
    /// Returns immediately in two cases:
    ///
    /// - with `true` if `refused` is `None` or no longer the latest credentials
    /// - with `false` if the client can't resume because it has no event id
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: dropping the future loses nothing.
    pub(in crate::event_store) async fn await_credentials(
        &self,
        refused: Option<&Arc<Credentials>>,
    ) -> bool {
        loop {
            let credentials_renewed = self.0.credentials_renewed.notified();
            tokio::pin!(credentials_renewed);
            credentials_renewed.as_mut().enable();
            let reader = {
                let mut state = self.state();
                let is_same = match (&state.credentials, refused) {
                    (Some(latest), Some(refused)) => Arc::ptr_eq(latest, refused),
                    _ => false,
                };
                if !is_same {
                    return true;
                }
                if !state.ring.has_events() {
                    return false;
                }
                state.has_refused_credentials = true;
                state.ring.detach_reader();
                state.reader.take()
            };
            if let Some(reader) = reader {
                reader.wake();
            }
            self.0.reader_progress.notify_waiters();
            credentials_renewed.await;
        }
    }

    /// Marks a check of a client's credentials as pending until the returned guard is dropped.
    pub(in crate::event_store) fn begin_check(&self) -> PendingCheckGuard {
        self.0.pending_checks.fetch_add(1, Ordering::Relaxed);
        PendingCheckGuard(self.clone())
    }

    /// Returns `true` while the server is checking a client's credentials.
    pub(in crate::event_store) fn has_pending_check(&self) -> bool {
        self.0.pending_checks.load(Ordering::Relaxed) > 0
    }
}

// === impl PendingCheckGuard ===

impl Drop for PendingCheckGuard {
    fn drop(&mut self) {
        self.0.0.pending_checks.fetch_sub(1, Ordering::Relaxed);
    }
}
