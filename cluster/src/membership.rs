//! This instance's membership: its lease, and what its heartbeats report.

pub(crate) mod heartbeat;
pub(crate) mod turned_away;
