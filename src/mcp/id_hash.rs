//! Hashing for server-issued ids.
//!
//! Every request looks up its session several times, so the hash has to be fast. It does not have to withstand attacker-chosen
//! input, because clients don't get to choose these ids. Where only hashes are compared (`replay::has_answer`, `StandaloneIds`),
//! a client sending a colliding id affects only its own session.

use std::hash::BuildHasher as _;

use foldhash::quality::FixedState;

/// The hasher for maps keyed by these ids.
pub(super) type IdHasher = foldhash::fast::RandomState;

/// Returns an id's hash, which is stable for the lifetime of the process.
pub(super) fn hash(id: &str) -> u64 {
    FixedState::default().hash_one(id)
}
