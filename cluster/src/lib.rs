//! Runs several instances of one MCP server behind a load balancer without sticky sessions.
//!
//! A client can reach its session through any instance. If a client disconnects and does not resume within the grace period, its call is
//! cancelled only once the client provably cannot have resumed on another instance.
//!
//! Each session is open on one instance, its owner, and the other instances relay its requests there over plain HTTP. That way, a request
//! to resume or cancel a call, or an answer to one of the server's own requests, reaches the instance running the call, where
//! [`mcp_cancel_on_disconnect`](https://docs.rs/mcp-cancel-on-disconnect) tracks the client. Redis or Valkey is used only as the directory,
//! which stores each session's owner, the data needed to restore the session, and the answers to calls that ended while their clients were
//! disconnected.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod answers;
mod builder;
mod cluster;
mod directory;
mod ids;
mod layer;
mod lock;
mod log;
mod manager;
mod membership;
mod metrics;
mod orphan_confirmation;
mod rate_limited_warning;
mod refusals;
mod relay;
mod routing;
mod session_closers;
mod sessions;
mod shutdown;
#[cfg(test)]
mod tests;
mod ttl_cache;
mod wait_until;

pub use self::{
    builder::{ClusterBuilder, ConnectError},
    cluster::Cluster,
    directory::MemoryDirectory,
    layer::{ClusterFuture, ClusterLayer, ClusterService},
    manager::ClusterSessionManager,
};
