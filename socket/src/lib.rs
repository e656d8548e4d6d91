//! TCP sockets for [hyper](https://docs.rs/hyper) that detect dead peers, and disconnects while hyper is not reading.
//!
//! hyper detects a disconnect only when it reads from its socket or writes to it. Two gaps remain:
//!
//! 1. The network drops packets, so that none arrives, and the kernel does not probe. With the socket options that [`DeadPeer`]
//!    sets, the kernel does probe, and eventually gives up.
//! 2. hyper is not reading, either because its buffer already has bytes of the next request or because the handler is not
//!    reading the request body. In that case, hyper detects neither a FIN nor an RST. [`Peer::closed`] asks the kernel instead,
//!    through the registration that tokio already has for the socket ([`WatchedListener`] has an example). It works only on
//!    Linux and Android. On other systems it never completes.
//!
//! Contract:
//! 1. A [`Peer`] never keeps a connection open. It holds the socket only while [`Peer::closed`] is being awaited, and releases
//!    it on the first poll after the [`WatchedStream`] has been dropped.
//! 2. [`Peer::closed`] completes because of the peer or the network, never because of this side.
//! 3. Watching a connection reads nothing from its socket and needs no timer. No task is woken before the connection is closed.
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
