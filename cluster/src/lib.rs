//! Runs several instances of one MCP server behind a load balancer without sticky sessions.
//!
//! A request reaches its session on whichever instance it arrives. No abandoned call is cancelled without proof that its client cannot have
//! resumed on another instance.
//!
//! Each session is open on one instance, its owner. Other instances relay its requests to the owner by plain HTTP. Redis or Valkey is only
//! the directory of owners. A resume, a cancel and an answer to the server's own question therefore reach the instance on which the call
//! runs. There [`mcp_cancel_on_disconnect`](https://docs.rs/mcp-cancel-on-disconnect) observes what the client does.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod answers;
mod body_idle;
mod builder;
mod cluster;
mod continue_body;
mod directory;
mod drain_gate;
mod fields;
mod filter;
mod heartbeat;
mod ids;
mod pending_restores;
mod replayable_request;
mod request_kind;
mod session_closers;
mod shutdown;

mod generations;
mod layer;
mod lock;
mod log;
mod manager;
mod metrics;
mod network;
mod orphan_confirmation;
mod owner_cache;
mod peers;
mod rate_limited_warning;
mod refusals;
mod relay;
mod request_context;
mod resume;
mod routed;
mod router;
mod routing_plan;
mod serving;
mod sessions;
mod store;
#[cfg(test)]
mod tests;
mod ttl_cache;
mod turned_away;
mod wait_until;
mod wire;

pub use self::{
    builder::{ClusterBuilder, ConnectError},
    cluster::Cluster,
    directory::MemoryDirectory,
    layer::{ClusterFuture, ClusterLayer, ClusterService},
    manager::ClusterSessionManager,
};
