//! TCP sockets for [hyper](https://docs.rs/hyper) that detect dead peers, and disconnects while hyper is not reading.
//!
//! hyper detects a disconnect when it reads from, or writes to, its socket. Two gaps remain:
//!
//! 1. The network drops packets. No packet arrives, and the kernel does not probe. With the socket options that [`DeadPeer`]
//!    sets, the kernel probes, and gives up.
//! 2. hyper is not reading, because its buffer has bytes of the next request, or because the handler does not read the request
//!    body. Then hyper detects neither FIN nor RST. [`Peer::closed`] asks the kernel instead, through the registration that
//!    tokio already has for the socket. [`WatchedListener`] has an example. [`Peer::closed`] works on Linux and Android only. On
//!    other systems it never completes.
//!
//! Contract:
//! 1. A [`Peer`] never keeps a connection open. It holds the socket only while [`Peer::closed`] is being awaited, and
//!    releases it in the first poll after the [`WatchedStream`] is dropped.
//! 2. [`Peer::closed`] completes because of the peer or the network, never because of this side.
//! 3. No byte is read from the socket, and no timer polls it. No task is woken before the connection is closed.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `axum` | [`WatchedListener`] as a listener for `axum::serve`, and [`Peer`] as its connect info |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod dead_peer;
mod listener;
mod peer;
#[cfg(feature = "axum")]
mod serve;
mod stream;

pub use self::{
    dead_peer::{Applied, DeadPeer},
    listener::WatchedListener,
    peer::Peer,
    stream::WatchedStream,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
