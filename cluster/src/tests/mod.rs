//! Instances over real sockets, all in one process and sharing one in-memory directory.

#![allow(
    clippy::disallowed_methods,
    reason = "servers and concurrent clients of a test need their own tasks"
)]

mod compositions;
mod concurrent_claims;
mod delayed_requests;
mod event_store;
mod failed_instance;
mod fake_owner;
mod faults;
mod inner_layers;
mod last_moment;
mod lateness;
pub(crate) mod log_lines;
mod many_orphans;
mod node;
mod orphans;
mod permits;
mod races;
mod reclaim;
mod refused_clients;
mod relays;
mod reports;
mod resumes;
mod services;
mod shutdown;
mod simulation;
mod slow_close;
mod steps;
mod turned_away;
mod unconfirmed;
mod untrusted_peers;

pub(crate) use self::simulation::wall_clock as simulated_clock;
