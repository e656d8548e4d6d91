//! hyper does not detect a disconnect while it has not read all of the connection's bytes.

use std::convert::Infallible;

use http_body_util::Empty;
use hyper::{
    Request,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    select,
    sync::mpsc,
};

use super::MENDED;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n";

/// The second connection's client disconnects after the first's, which has sent one more byte.
#[tokio::test]
async fn hyper_misses_a_disconnect_behind_unread_bytes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (started, mut begins) = mpsc::unbounded_channel();
    let accept = async |bytes: &[u8]| {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(bytes).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let started = started.clone();
        let service = service_fn(move |_: Request<Incoming>| {
            let _sent = started.send(());
            std::future::pending::<Result<http::Response<Empty<Bytes>>, Infallible>>()
        });
        let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        (client, Box::pin(served))
    };
    let (unread, mut behind_unread) = accept(&[REQUEST, b"G"].concat()).await;
    let (plain, mut without) = accept(REQUEST).await;
    for _ in 0..2 {
        select! {
            _ = &mut behind_unread => panic!("it serves its request"),
            _ = &mut without => panic!("it serves its request"),
            started = begins.recv() => started.unwrap(),
        }
    }

    drop(unread);
    drop(plain);

    select! {
        biased;
        _ = &mut behind_unread => panic!("{MENDED}"),
        _ = &mut without => {}
    }
}
