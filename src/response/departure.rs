//! Whether the client is still connected, where its socket is watched.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use http::Extensions;

/// Ends when the client's connection does, also where hyper does not look.
pub(crate) struct Departure(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

// === impl Departure ===

impl Departure {
    /// `None` where nobody watches the socket.
    #[cfg(feature = "socket")]
    pub(crate) fn of(extensions: &Extensions) -> Option<Self> {
        let peer = crate::socket::Peer::of(extensions)?;
        Some(Self(peer.watch()))
    }

    #[cfg(not(feature = "socket"))]
    pub(crate) fn of(_: &Extensions) -> Option<Self> {
        None
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}
