//! Limits how long connecting to the server takes, and how much is read from it at a time.
//!
//! The TCP connector's timeout only covers the TCP handshake. [`SmallReads`] applies the same timeout to the entire connection
//! attempt, including the name lookup and the TLS handshake.
//!
//! hyper doubles its buffer each time a read fills it, up to 400 KiB. While a client is not reading, its connection to the
//! server holds up to three of these buffers. A read through [`SmallReads`] does not even fill the smallest buffer, so the
//! buffer never grows. hyper's own limit for heads is not affected.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::BoxError;
use http::Uri;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::time::timeout;
use tower_service::Service;

/// Maximum number of bytes per read, which is one less than hyper's smallest buffer.
const MAX_READ: usize = 8 * 1024 - 1;

/// How long opening a connection to the server may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connector whose connections only read a little at a time, or one of its connections.
#[derive(Debug, Clone)]
pub(super) struct SmallReads<T>(pub(super) T);

// === impl SmallReads ===

impl<C> Service<Uri> for SmallReads<C>
where
    C: Service<Uri, Error: Into<BoxError>, Future: Send + 'static>,
{
    type Response = SmallReads<C::Response>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            match timeout(CONNECT_TIMEOUT, connecting).await {
                Ok(connection) => connection.map(SmallReads).map_err(Into::into),
                Err(_) => {
                    let text = "connecting, including the TLS handshake, took longer than 5 s";
                    Err(io::Error::new(io::ErrorKind::TimedOut, text).into())
                }
            }
        })
    }
}

impl<T: Read + Unpin> Read for SmallReads<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut to: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut space = [MaybeUninit::uninit(); MAX_READ];
        let (space, _) = space.split_at_mut(MAX_READ.min(to.remaining()));
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
