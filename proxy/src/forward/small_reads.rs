//! Connections that are read a little at a time.
//!
//! hyper doubles its buffer each time that a read has filled it, up to 400 KiB. Behind a client that does not read, a connection
//! to the server holds up to three such buffers. Here no read fills even the smallest, so it stays. How long a head may be is
//! another matter, and hyper's.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::{TryFutureExt as _, future::MapOk};
use http::Uri;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tower_service::Service;

/// The most that is read at a time: a byte less than hyper's smallest buffer.
const MOST: usize = 8 * 1024 - 1;

/// Has connections read a little at a time; and one of those.
#[derive(Debug, Clone)]
pub(super) struct SmallReads<T>(pub(super) T);

// === impl SmallReads ===

impl<C: Service<Uri>> Service<Uri> for SmallReads<C> {
    type Response = SmallReads<C::Response>;
    type Error = C::Error;
    type Future = MapOk<C::Future, fn(C::Response) -> SmallReads<C::Response>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.0.call(uri).map_ok(SmallReads)
    }
}

impl<T: Read + Unpin> Read for SmallReads<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut to: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut space = [MaybeUninit::uninit(); MOST];
        let (space, _) = space.split_at_mut(MOST.min(to.remaining()));
        let mut read = ReadBuf::uninit(space);
        ready!(Pin::new(&mut self.0).poll_read(cx, read.unfilled()))?;
        to.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl<T: Write + Unpin> Write for SmallReads<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, from)
    }
}

impl<T: Connection> Connection for SmallReads<T> {
    fn connected(&self) -> Connected {
        self.0.connected()
    }
}
