//! Implements `axum::serve`'s listener traits for watched connections (feature `axum`).

use std::{io, net::SocketAddr};

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener, TapIo},
};

use super::{listener::WatchedListener, peer::Peer, stream::WatchedStream};

impl Listener for WatchedListener {
    type Io = WatchedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (WatchedStream, SocketAddr) {
        Self::accept(self).await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }
}

impl Connected<IncomingStream<'_, WatchedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, WatchedListener>) -> Self {
        stream.io().peer()
    }
}

impl<F> Connected<IncomingStream<'_, TapIo<WatchedListener, F>>> for Peer
where
    F: FnMut(&mut WatchedStream) + Send + 'static,
{
    fn connect_info(stream: IncomingStream<'_, TapIo<WatchedListener, F>>) -> Self {
        stream.io().peer()
    }
}
