//! The hash of ids that the server issues.
//!
//! It is fast, because every request looks up its session several times. It does not resist chosen ids, because no client chooses an id
//! that the server issues. Where only hashes are compared (`replay::has_answer`, `StandaloneIds`), a client that sends a colliding id
//! affects only its own session.

use std::hash::BuildHasher as _;

use foldhash::quality::FixedState;

/// Hashes the ids of a map.
pub(super) type IdHasher = foldhash::fast::RandomState;

/// Returns the hash of an id. Equal ids have equal hashes for as long as the process runs.
pub(super) fn of(id: &str) -> u64 {
    FixedState::default().hash_one(id)
}
