//! Hashes for looking up sessions, requests and event ids.
//!
//! One map contains all session ids, and each session state has a map of its accepted requests. Both are keyed by 64-bit hashes. A session
//! state stores its id's hash, which is mixed into the hashes of its requests. The hashes use secrets, so no client can choose colliding
//! keys. A hit is only a hint: the session ids and request ids themselves are compared afterwards, so a collision results in no match,
//! never in the wrong call.
//!
//! There is no map of event ids. Resumes are rare, so a resume simply compares its event id with the ids of its session's calls.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::{BuildHasher, BuildHasherDefault, Hasher},
};

use crate::call::{RequestId, Scope};

/// A stream, as identified by one of its event ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamId {
    /// The number after the slash in `<index>/<stream>`.
    Numbered(u64),
    /// Keyed hash of an entire event id.
    Opaque(u64),
}

/// An event id, parsed and hashed for comparison with known ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventId {
    /// Index and stream. `None` if the id is not in rmcp's format.
    pub(super) numbers: Option<(u64, u64)>,
    /// Keyed hash of the entire event id.
    pub(super) hash: u64,
}

/// A key's hash. It already has a secret mixed in, so maps need not hash it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct KeyHash(u64);

pub(crate) type PrehashedMap<V> = HashMap<KeyHash, V, BuildHasherDefault<PrehashedHasher>>;

/// A hasher for keys that are already hashes.
#[derive(Debug, Default)]
pub(crate) struct PrehashedHasher(u64);

/// Computes keyed hashes, using secrets unknown to clients.
#[derive(Debug)]
pub(crate) struct KeyHasher {
    keyed: RandomState,
    /// An odd multiplier for each kind of key.
    managers: u64,
    paths: u64,
    number_ids: u64,
    string_ids: u64,
}

/// The sessions sharing a session state's id.
///
/// There is one session for each scope in which a call has had a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScopeSet {
    None,
    One(KeyHash),
    Several,
}

// === impl KeyHash ===

impl KeyHash {
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// Returns the hash of a key in this session.
    ///
    /// A client chooses the key, but knows neither the session's hash nor the multiplier. Keys that differ in only a few bits differ in
    /// some bits of the first product and may differ in any bit of the second.
    fn mix(self, key: u64, multiplier: u64) -> Self {
        let once = fold(self.0 ^ key, multiplier);
        Self(fold(once ^ self.0.rotate_left(32), multiplier))
    }
}

/// XORs the two halves of a product.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

// === impl ScopeSet ===

impl ScopeSet {
    pub(super) fn with(self, session: KeyHash) -> Self {
        match self {
            Self::None => Self::One(session),
            Self::One(known) if known == session => self,
            Self::One(_) | Self::Several => Self::Several,
        }
    }
}

// === impl KeyHasher ===

impl Default for KeyHasher {
    fn default() -> Self {
        let keyed = RandomState::new();
        let multiplier = |kind: &str| keyed.hash_one(kind) | 1;
        Self {
            managers: multiplier("managers"),
            paths: multiplier("paths"),
            number_ids: multiplier("number ids"),
            string_ids: multiplier("string ids"),
            keyed,
        }
    }
}

impl KeyHasher {
    /// Returns the hash of a session id.
    pub(crate) fn session_id(&self, id: &str) -> KeyHash {
        KeyHash(self.keyed.hash_one(id))
    }

    /// Returns the hash of the session with this id in a scope.
    pub(super) fn session(&self, id: KeyHash, scope: &Scope) -> KeyHash {
        match scope {
            Scope::Manager(number) => id.mix(*number, self.managers),
            Scope::Path(path) => id.mix(self.keyed.hash_one(path), self.paths),
        }
    }

    pub(super) fn request(&self, session: KeyHash, request: &RequestId) -> KeyHash {
        match request {
            RequestId::Number(number) => session.mix(number.cast_unsigned(), self.number_ids),
            RequestId::String(text) => session.mix(self.keyed.hash_one(text), self.string_ids),
        }
    }

    /// Returns the hash of an entire event id.
    pub(super) fn event(&self, event_id: &[u8]) -> u64 {
        self.keyed.hash_one(event_id)
    }

    pub(super) fn event_id(&self, event_id: &[u8]) -> EventId {
        EventId {
            numbers: numbers(event_id),
            hash: self.event(event_id),
        }
    }
}

// === impl StreamId ===

impl StreamId {
    /// Returns `true` if an event belongs to this stream.
    pub(super) fn contains(self, event: EventId) -> bool {
        match self {
            Self::Numbered(stream) => event.numbers.is_some_and(|(_, number)| number == stream),
            Self::Opaque(hash) => event.hash == hash,
        }
    }
}

/// Returns the numbers in `<index>/<stream>`, or `None` for any other text.
///
/// Both are decimal and have at most 19 digits, as written and read by rmcp.
pub(crate) fn numbers(event_id: &[u8]) -> Option<(u64, u64)> {
    let (mut index, mut number, mut digits) = (None, 0_u64, 0);
    for byte in event_id {
        match byte {
            // A 19-digit number fits into a `u64`.
            b'0'..=b'9' if digits < 19 => {
                number = 10 * number + u64::from(byte - b'0');
                digits += 1;
            }
            b'/' if digits > 0 && index.is_none() => {
                index = Some(number);
                (number, digits) = (0, 0);
            }
            _ => return None,
        }
    }
    index.filter(|_| digits > 0).zip(Some(number))
}

// === impl PrehashedHasher ===

impl Hasher for PrehashedHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn an_rmcp_event_id_has_an_index_and_a_stream() {
        for (id, expected) in [
            ("0/0", (0, 0)),
            ("17/3", (17, 3)),
            ("0/18446744073709551", (0, 18446744073709551)),
        ] {
            assert_eq!(numbers(id.as_bytes()), Some(expected), "{id}");
        }
        for opaque in [
            "", "/", "0", "0/", "/0", "a/0", "0/b", "0/0/0", "+1/0", "0/-1", " 0/0",
        ] {
            assert_eq!(numbers(opaque.as_bytes()), None, "{opaque}");
        }
        assert_eq!(numbers(b"0/99999999999999999999"), None);
    }

    /// Ids that differ in one place or by powers of two.
    ///
    /// In a map whose hash is known, they would fill a single bucket.
    #[test]
    fn chosen_ids_collide_no_more_than_random_ones() {
        let hasher = KeyHasher::default();
        let session = hasher.session(hasher.session_id("a"), &Scope::Path("/".into()));
        let request_hash = |id: RequestId| hasher.request(session, &id).0;
        let counted = (0..4_096).map(|n| request_hash(RequestId::Number(n << 32)));
        let spelled = (0..4_096).map(|n| request_hash(RequestId::String(format!("{n:x}").into())));
        let padded = (1..4_096).map(|n| request_hash(RequestId::String("x".repeat(n).into())));
        let sessions = (0..4_096).map(|n| {
            let id = hasher.session_id(&format!("{:032x}", n / 2));
            hasher.session(id, &Scope::Manager(n % 2)).0
        });
        let sets: Vec<Vec<u64>> = vec![
            counted.collect(),
            spelled.collect(),
            padded.collect(),
            sessions.collect(),
        ];
        for hashes in sets {
            for shift in [0, 24, 48] {
                let low: HashSet<u64> = hashes.iter().map(|hash| hash >> shift & 0xffff).collect();
                // Of 4,096 random 16-bit values, about 3,970 are distinct.
                assert!(low.len() > 3_900, "{} at {shift}", low.len());
            }
        }
    }

    /// A collision that a client finds in one process is of no use in another.
    #[test]
    fn every_process_has_its_own_hashes() {
        let [a, b] = [KeyHasher::default(), KeyHasher::default()];
        assert_ne!(a.event(b"opaque"), b.event(b"opaque"));
    }

    #[test]
    fn keys_of_different_kinds_do_not_collide() {
        let hasher = KeyHasher::default();
        let session = |id: &str, path: &str| {
            let scope = Scope::Path(path.into());
            hasher.session(hasher.session_id(id), &scope)
        };
        let slot = session("a", "/");
        assert_ne!(slot, session("b", "/"));
        assert_ne!(slot, session("a", "/b"));
        assert_ne!(
            hasher.request(slot, &RequestId::Number(1)),
            hasher.request(slot, &RequestId::String("1".into())),
        );
        assert_ne!(hasher.event(b"x"), hasher.event(b"y"));
    }
}
