//! Runs several instances of one MCP server behind a load balancer without sticky sessions.
//!
//! A request reaches its session through any instance. No orphaned call (one whose client did not resume within the grace) is
//! cancelled without proof that the client cannot have resumed on another instance.
//!
//! Each session is open on one instance, its owner. Other instances relay its requests to the owner by plain HTTP. A resume, a cancel or an
//! answer to the server's own request therefore reaches the instance on which the call runs. There
//! [`mcp_cancel_on_disconnect`](https://docs.rs/mcp-cancel-on-disconnect) tracks the client. Redis or Valkey is only the directory. It
//! stores the owners of sessions, the data to restore the sessions, and the answers to calls that ended without their clients.

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
