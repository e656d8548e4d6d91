//! The sockets below HTTP. The kernel can look for dead peers, and knows before hyper that a client has left.
//!
//! hyper learns that a client has left by reading from, or writing to, its socket. That leaves two gaps:
//!
//! 1. The network swallows packets. Nothing arrives, and nothing makes the kernel look. [`DeadPeer`] sets the
//!    socket options that make it look, and that make it give up.
//! 2. hyper does not read. It has stopped because bytes of a next request are in its buffer, or because the
//!    handler leaves its request body unread; then neither FIN nor RST reaches it. [`Peer::closed`] asks the kernel
//!    instead, through the one registration that tokio has for the socket anyway. [`WatchedListener`] shows how.
//!
//! Contract:
//! 1. A [`Peer`] never keeps a connection open. It holds the socket only while [`Peer::closed`] is being awaited, and
//!    lets go in the first poll after the [`WatchedStream`] was dropped.
//! 2. [`Peer::closed`] returns because of what the peer or the network did, never because of what this side did.
//! 3. Nothing is read from the socket and nothing polls by time: while no peer closes, no task is woken.

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
