//! hyper's read buffer grows to 400 KiB per connection, however much of the body is read.

use std::{
    io,
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll},
};

use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request,
    body::Bytes,
    client::conn::http1,
    rt::{Read, ReadBufCursor, Write},
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    join,
};

use super::MENDED;

/// The body's length.
const LENGTH: usize = 4 << 20;

/// The largest buffer that hyper has read into.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Recorder(TokioIo<DuplexStream>);

#[tokio::test]
async fn hyper_reads_into_buffers_of_hundreds_of_kilobytes() {
    let (client, mut server) = duplex(1 << 20);
    let (mut send, connection) = http1::handshake(Recorder(TokioIo::new(client)))
        .await
        .unwrap();
    let serve = async {
        server.read_u8().await.unwrap(); // The request has started.
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n");
        server.write_all(head.as_bytes()).await.unwrap();
        server.write_all(&vec![b'x'; LENGTH]).await.unwrap();
        server
    };
    let receive = async {
        let response = send
            .send_request(Request::new(Empty::<Bytes>::new()))
            .await
            .unwrap();
        response.into_body().collect().await.unwrap();
        drop(send);
    };
    let (_server, (), ended) = join!(serve, receive, connection);
    ended.unwrap();
    assert!(LARGEST.load(Ordering::Relaxed) > 100 << 10, "{MENDED}");
}

// === impl Recorder ===

impl Read for Recorder {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        LARGEST.fetch_max(to.remaining(), Ordering::Relaxed);
        Pin::new(&mut self.0).poll_read(cx, to)
    }
}

impl Write for Recorder {
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
}
