//! Eviction of retained calls, when those of all sessions together exceed their limit.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;

use super::{EvictedAnswer, Registry, SessionEntry, Tracked, core::DeliveryState};

/// A session with retained calls.
struct EvictionCandidate<T> {
    entry: Arc<SessionEntry<T>>,
    bytes: usize,
    /// When its oldest retained call expires.
    earliest_expiry: Option<Instant>,
}

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Evicts the oldest retained calls of the sessions with the most bytes, delivered ones first, until all sessions together
    /// have seven eighths of the limit. Returns the evicted calls that a client might still have resumed.
    ///
    /// The target is below the limit, so that not every new retained call evicts.
    pub(crate) fn evict(&self) -> Vec<EvictedAnswer> {
        let mut evicted = Vec::new();
        if self.pending_evictions.fetch_add(1, Ordering::AcqRel) > 0 {
            // The thread that evicts now checks once more.
            return evicted;
        }
        let mut pending = 1;
        while pending > 0 {
            let seen = self.pending_evictions.load(Ordering::Acquire);
            self.evict_once(&mut evicted);
            pending = self.pending_evictions.fetch_sub(seen, Ordering::AcqRel) - seen;
        }
        evicted
    }

    fn evict_once(&self, evicted: &mut Vec<EvictedAnswer>) {
        let totals = &self.sessions.shared.totals;
        let max_bytes = totals.max_bytes();
        if totals.bytes() <= max_bytes {
            return;
        }
        let target = max_bytes - max_bytes / 8;
        for delivery in DeliveryState::ALL {
            let Some(excess) = totals.bytes().checked_sub(target) else {
                break;
            };
            if totals.bytes_of(delivery) == 0 {
                continue;
            }
            let mut candidates = self.candidates(delivery);
            let threshold =
                eviction_threshold(candidates.iter().map(|candidate| candidate.bytes), excess);
            candidates.retain(|candidate| candidate.bytes > threshold);
            candidates.sort_by_key(|candidate| candidate.earliest_expiry);
            for candidate in candidates {
                if totals.bytes() <= target {
                    break;
                }
                evicted.extend(candidate.entry.with(|core| {
                    core.shrink_retained(delivery, threshold);
                    core.take_evicted()
                }));
            }
        }
    }

    fn candidates(&self, delivery: DeliveryState) -> Vec<EvictionCandidate<T>> {
        let candidates = self.sessions.entries().filter_map(|entry| {
            let (bytes, earliest_expiry) =
                entry.read(|core| (core.bytes_of(delivery), core.earliest_expiry(delivery)));
            (bytes > 0).then_some(EvictionCandidate {
                entry,
                bytes,
                earliest_expiry,
            })
        });
        candidates.collect()
    }
}

/// Returns the size to which the larger ones are cut, so that `excess` is cut off in all. Returns 0 if there is less.
fn eviction_threshold(sizes: impl Iterator<Item = usize>, excess: usize) -> usize {
    let mut sizes: Vec<usize> = sizes.collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    let smaller = sizes.iter().skip(1).copied().chain([0]);
    let mut cut = 0;
    for (count, (size, next)) in (1..).zip(sizes.iter().zip(smaller)) {
        let step = count * (size - next);
        if cut + step >= excess {
            return size - (excess - cut).div_ceil(count);
        }
        cut += step;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_cut_first_and_just_enough() {
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 3), 7);
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 5), 6);
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 9), 4);
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 10), 3);
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 21), 0);
        assert_eq!(eviction_threshold([10, 4, 7].into_iter(), 22), 0);
        assert_eq!(eviction_threshold([].into_iter(), 1), 0);
    }
}
