//! The membership of this instance: its lease, and what its heartbeats report.

pub(crate) mod heartbeat;
pub(crate) mod turned_away;
