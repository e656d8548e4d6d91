//! TCP sockets for [hyper](https://docs.rs/hyper) that detect dead peers and disconnects that hyper misses.
//!
//! hyper detects a disconnect only when it reads from its socket or writes to it, so it misses two cases:
//!
//! 1. The network drops all packets, so neither a FIN nor an RST arrives. With the socket options set by [`DeadPeer`], the
//!    kernel probes the connection, and eventually gives up.
//! 2. hyper is not reading, either because its buffer already contains part of the next request or because the handler is not
//!    reading the request body. In that case, hyper does not notice a FIN or an RST. [`Peer::closed`] gets this information
//!    from the kernel, through tokio's existing registration of the socket ([`WatchedListener`] has an example). It works only
//!    on Linux and Android. On other systems it never completes.
//!
//! The crate guarantees the following:
//! 1. A [`Peer`] never keeps a connection open. It holds the socket only while [`Peer::closed`] is being awaited, and releases
//!    it on the first poll after the [`WatchedStream`] has been dropped.
//! 2. [`Peer::closed`] completes because of the peer or the network, never because of this side.
//! 3. Watching a connection does not read from its socket, needs no timer, and wakes no task until the connection is closed.
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
