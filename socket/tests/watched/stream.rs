//! A watched stream reads and writes like a plain TCP stream.

use std::io::{ErrorKind, IoSlice};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{reset, unread};
use test_support::within;

#[tokio::test]
async fn megabytes_pass_in_both_directions_through_full_buffers() {
    let (stream, _peer, client) = unread().await;
    let data: Vec<u8> = (0..8_000_000_u32)
        .map(|index| (index % 251) as u8)
        .collect();
    let (mut server_reader, mut server_writer) = tokio::io::split(stream);
    let (mut client_reader, mut client_writer) = client.into_split();
    let echo = async {
        tokio::io::copy(&mut server_reader, &mut server_writer)
            .await
            .unwrap();
        server_writer.shutdown().await.unwrap();
    };
    let send = async {
        client_writer.write_all(&data).await.unwrap();
        client_writer.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let receive = client_reader.read_to_end(&mut received);
    let (_, _, received_all) =
        within("the echo", async { tokio::join!(echo, send, receive) }).await;
    received_all.unwrap();
    assert!(received == data, "a byte was lost, changed or reordered");
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
