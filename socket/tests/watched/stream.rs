//! A watched stream is a TCP stream like any other.

use std::io::{ErrorKind, IoSlice};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{reset, unread};
use test_support::within;

#[tokio::test]
async fn megabytes_pass_in_both_directions_through_full_buffers() {
    let (stream, _peer, client) = unread().await;
    let data: Vec<u8> = (0..8_000_000_u32).map(|at| (at % 251) as u8).collect();
    let (mut back, mut out) = tokio::io::split(stream);
    let (mut echoed, mut sent) = client.into_split();
    let echo = async {
        tokio::io::copy(&mut back, &mut out).await.unwrap();
        out.shutdown().await.unwrap();
    };
    let send = async {
        sent.write_all(&data).await.unwrap();
        sent.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let receive = echoed.read_to_end(&mut received);
    let (_, _, received_all) =
        within("the echo", async { tokio::join!(echo, send, receive) }).await;
    received_all.unwrap();
    assert!(received == data, "every byte was returned in order");
}

#[tokio::test]
async fn more_slices_than_the_kernel_accepts_are_written_in_parts() {
    const SLICES: usize = 5_000;
    let (mut stream, _peer, mut client) = unread().await;
    let send = async {
        let mut slices = &mut vec![IoSlice::new(b"x"); SLICES][..];
        while !slices.is_empty() {
            let written = stream.write_vectored(slices).await.unwrap();
            IoSlice::advance_slices(&mut slices, written);
        }
    };
    within("the slices to be written", send).await;
    client.read_exact(&mut [0; SLICES]).await.unwrap();
}

#[tokio::test]
async fn a_reset_stream_fails_and_still_shuts_down() {
    let (mut stream, peer, client) = unread().await;
    reset(client);
    within("the peer to close", peer.closed()).await;
    let error = stream.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    stream.shutdown().await.unwrap();
}
