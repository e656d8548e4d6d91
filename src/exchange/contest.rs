//! Handles untracked requests that have the same id as an in-flight call.
//!
//! A cancellation identifies its call by this id. Once the server may have received the untracked request, a cancellation meant for the
//! call could therefore cancel that request instead, so none is injected while the request is in progress. Once the server has accepted
//! the request, the call is no longer tracked.

use std::sync::Arc;

use super::{
    request_body::Contested,
    state::{Exchange, Registry},
};
use crate::call::{CallId, Key};

/// An untracked request in progress and the in-flight call with the same id.
///
/// While this exists, no cancellation of that call is injected.
pub(crate) struct Contest {
    older: CallId,
    exchange: Arc<Exchange>,
}

// === impl Contest ===

impl Contest {
    /// Begins a contest for `key`, or returns `None` if no in-flight call has this key.
    pub(crate) fn begin(registry: &Registry, key: &Key) -> Option<Self> {
        let contested = registry.with_session(&key.session.id, |session| {
            session.contest(&key.session.scope, &key.request)
        });
        let (older, exchange) = contested??;
        Some(Self { older, exchange })
    }

    /// Untracks the older call, because the server has accepted the request. Does nothing if that call has ended.
    #[cold]
    pub(crate) fn on_accepted(self) {
        let Self { older, exchange } = &self;
        if let Some(finished) = exchange
            .with_session(|session| session.finish(*older, None))
            .flatten()
        {
            exchange.end_untracked(*older, finished);
        }
    }
}

impl Contested for Contest {
    fn on_accepted(self: Box<Self>) {
        Self::on_accepted(*self);
    }
}

impl Drop for Contest {
    fn drop(&mut self) {
        self.exchange
            .with_session(|session| session.end_contest(self.older));
    }
}
