//! Hashing for the ids that the server issues.
//!
//! Every request looks up its session several times, so the hash has to be fast. It does not have to withstand attacker-chosen
//! ids, because clients don't get to choose these ids. Where only hashes are compared (`replay::has_answer`, `StandaloneIds`), a
//! client that sends a colliding id affects only its own session.

use std::hash::BuildHasher as _;

use foldhash::quality::FixedState;

/// The hasher for maps keyed by such ids.
pub(super) type IdHasher = foldhash::fast::RandomState;

/// Returns an id's hash, which stays the same for as long as the process runs.
pub(super) fn hash(id: &str) -> u64 {
    FixedState::default().hash_one(id)
}
