//! The hash of ids that the server issues.
//!
//! It is fast, because every request looks up its session several times, and it resists no client that chooses ids. A client does not
//! choose these. Where only hashes are compared (`replay::has_answer`), they decide whether a client already has its own answer.

use std::hash::BuildHasher as _;

use foldhash::quality::FixedState;

/// Hashes the ids of a map.
pub(super) type IdHasher = foldhash::fast::RandomState;

/// Returns the hash of an id. Equal ids have equal hashes for as long as the process runs.
pub(super) fn of(id: &str) -> u64 {
    FixedState::default().hash_one(id)
}
