//! Which events count as a disconnect of the peer on a socket that is not read.

use std::sync::atomic::Ordering;

use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{CountedWakes, reset, unread};
use test_support::within;

// === The peer disconnects ===

#[tokio::test]
async fn a_fin_behind_unread_bytes_is_detected() {
    let (_stream, peer, mut client) = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    drop(client);
    within("the peer to close", peer.closed()).await;
    assert!(peer.is_closed());
}

#[tokio::test]
async fn a_reset_behind_unread_bytes_is_detected() {
    let (_stream, peer, mut client) = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    reset(client);
    within("the peer to close", peer.closed()).await;
}

#[tokio::test]
async fn a_half_close_counts_as_closed() {
    let (_stream, peer, mut client) = unread().await;
    client.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    within("the peer to close", peer.closed()).await;
}

#[tokio::test]
async fn a_peer_that_closed_before_the_first_poll_is_closed() {
    let (_stream, peer, client) = unread().await;
    drop(client);
    within("the first waiter", peer.closed()).await;
    within("the second waiter", peer.clone().closed()).await;
}

#[tokio::test]
async fn every_waiter_is_notified() {
    let (_stream, peer, client) = unread().await;
    let mut waiting: Vec<_> = (0..100).map(|_| CountedWakes::new(peer.clone())).collect();
    for waiter in &mut waiting {
        assert!(waiter.poll_once().is_pending());
    }
    drop(client);
    for waiter in waiting {
        within("each of a hundred waiters", waiter).await;
    }
}

// === The peer stays connected ===

#[tokio::test]
async fn unread_data_wakes_no_task() {
    const SEGMENTS: usize = 200;
    let (stream, peer, mut client) = unread().await;
    let mut closed = CountedWakes::new(peer);
    assert!(closed.poll_once().is_pending());

    client.set_nodelay(true).unwrap();
    let mut seen = [0; SEGMENTS];
    for sent in 1..=SEGMENTS {
        client.write_all(b"x").await.unwrap();
        // One by one, so that the kernel reports each.
        while within("a segment", stream.tcp().peek(&mut seen))
            .await
            .unwrap()
            < sent
        {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(closed.wakes(), 0);

    drop(client);
    let wakes = closed.wakes.clone();
    within("the peer to close", closed).await;
    assert_eq!(wakes.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_idle_connection_is_not_closed() {
    let (mut stream, peer, mut client) = unread().await;
    let mut closed = CountedWakes::new(peer.clone());
    assert!(closed.poll_once().is_pending());
    for _ in 0..10 {
        client.write_all(b"ping").await.unwrap();
        let mut ping = [0; 4];
        stream.read_exact(&mut ping).await.unwrap();
        stream.write_all(b"pong").await.unwrap();
        client.read_exact(&mut ping).await.unwrap();
    }
    assert_eq!(closed.wakes(), 0);
    assert!(!peer.is_closed());
}

#[tokio::test]
async fn urgent_data_does_not_count_as_a_disconnect() {
    let (mut stream, peer, mut client) = unread().await;
    let mut closed = CountedWakes::new(peer.clone());
    assert!(closed.poll_once().is_pending());
    SockRef::from(&client).send_out_of_band(b"!").unwrap();
    client.write_all(b"x").await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    assert!(closed.poll_once().is_pending());
    assert!(!peer.is_closed());
}

// === This side disconnects ===

#[tokio::test]
async fn a_stored_peer_does_not_keep_the_connection_open() {
    let (stream, peer, mut client) = unread().await;
    let mut extensions = http::Extensions::new();
    extensions.insert(peer.clone());
    drop(stream);
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);
    assert!(!peer.is_closed());
}

#[tokio::test]
async fn a_waiter_releases_a_dropped_stream_in_its_next_poll() {
    let (stream, peer, mut client) = unread().await;
    let mut closed = CountedWakes::new(peer.clone());
    assert!(closed.poll_once().is_pending());
    drop(stream);
    within("a wake", closed.woken()).await;
    assert!(
        closed.poll_once().is_pending(),
        "this side closed the connection"
    );
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);

    drop(client);
    assert!(closed.poll_once().is_pending());
    assert!(!peer.is_closed());
}

#[tokio::test]
async fn shutting_down_our_write_side_does_not_count_as_a_disconnect() {
    let (mut stream, peer, mut client) = unread().await;
    let mut closed = CountedWakes::new(peer);
    assert!(closed.poll_once().is_pending());
    stream.shutdown().await.unwrap();
    assert_eq!(within("the end", client.read(&mut [0])).await.unwrap(), 0);
    client.write_all(b"x").await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    assert!(closed.poll_once().is_pending());

    drop(client);
    within("the peer to close", closed).await;
}
