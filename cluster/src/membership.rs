//! This instance's membership in the cluster: its lease, and what its heartbeats report.

pub(crate) mod heartbeat;
pub(crate) mod turned_away;
