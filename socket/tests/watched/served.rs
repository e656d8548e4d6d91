//! Watched connections under `axum::serve`.

use std::{net::SocketAddr, time::Duration};

use axum::{Router, extract::ConnectInfo, serve::ListenerExt as _};
use socket2::SockRef;
use test_support::{Connection, Request, within};
use tokio::{net::TcpListener, spawn, sync::mpsc};
use watched_socket::{DeadPeer, Peer, WatchedListener};

use super::CountedWakes;

#[tokio::test]
async fn every_request_of_a_connection_finds_its_peer() {
    let app = Router::new()
        .fallback(async |ConnectInfo(peer): ConnectInfo<Peer>| peer.addr().to_string());
    let addr = serve(app).await;
    let mut connection = Connection::open(addr).await;
    let mut replies = Vec::new();
    for _ in 0..2 {
        connection.send(&Request::new("GET", "/")).await;
        replies.push(connection.reply().await.text().to_owned());
    }
    assert!(replies[0].starts_with("127.0.0.1:"));
    assert_eq!(replies[0], replies[1]);
}

#[tokio::test]
async fn the_server_closes_a_connection_while_a_task_awaits_its_peer() {
    let (peer_sender, mut peers) = mpsc::unbounded_channel();
    let app = Router::new().fallback(async move |ConnectInfo(peer): ConnectInfo<Peer>| {
        peer_sender.send(peer).unwrap();
    });
    let addr = serve(app).await;
    let mut connection = Connection::open(addr).await;
    let request = Request::new("GET", "/").header("connection", "close");
    connection.send(&request).await;
    let peer = within("the handler", peers.recv()).await.unwrap();
    let mut closed = CountedWakes::new(peer);
    let watching = async {
        // Polled whenever it is woken, as a task would be.
        loop {
            assert!(
                closed.poll_once().is_pending(),
                "the client is still connected"
            );
            closed.woken().await;
        }
    };
    tokio::select! {
        () = watching => {}
        _ = connection.closed() => {}
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_tapped_listener_still_provides_peers_and_can_set_options() {
    let (peer_sender, mut peers) = mpsc::unbounded_channel();
    let app = Router::new().fallback(async move |ConnectInfo(peer): ConnectInfo<Peer>| {
        peer_sender.send(peer).unwrap();
    });
    let (limit_sender, mut limits) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let listener = WatchedListener::new(listener).tap_io(move |stream| {
        let options = DeadPeer::new().user_timeout(Duration::from_secs(21));
        options.apply(stream).unwrap();
        limit_sender
            .send(SockRef::from(&*stream).tcp_user_timeout().unwrap())
            .unwrap();
    });
    let make = app.into_make_service_with_connect_info::<Peer>();
    spawn(async move { axum::serve(listener, make).await.unwrap() });
    Connection::fetch(addr, &Request::new("GET", "/")).await;
    assert!(peers.recv().await.is_some());
    assert_eq!(limits.recv().await.unwrap(), Some(Duration::from_secs(21)));
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let make = app.into_make_service_with_connect_info::<Peer>();
    let listener = WatchedListener::new(listener);
    spawn(async move { axum::serve(listener, make).await.unwrap() });
    addr
}
