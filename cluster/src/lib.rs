//! Several instances of one MCP server behind a load balancer that does not stick: a session is found wherever its client
//! lands, and no abandoned call is cancelled without proof.
//!
//! A session lives on one instance, its owner. A request that lands elsewhere is relayed there by plain HTTP; Redis or Valkey
//! is only the directory of owners. So a resume, a cancel and an answer to the server's own question arrive where the call
//! runs, and [`mcp_cancel_on_disconnect`](https://docs.rs/mcp-cancel-on-disconnect) there sees what the client does.

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
mod resume;
mod resume_context;
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
