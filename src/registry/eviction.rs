//! The choice of what to forget when all sessions together remember too much.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;

use super::{EvictedAnswer, Registry, SessionEntry, Tracked, core::DeliveryState};

/// A session that remembers something.
struct EvictionCandidate<T> {
    entry: Arc<SessionEntry<T>>,
    bytes: usize,
    /// When the oldest of it is forgotten anyway.
    earliest_expiry: Option<Instant>,
}

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Has the sessions that hold the most forget their oldest records, spare ones first, until all together hold
    /// seven eighths of what they may. Returns what a client may still come for.
    ///
    /// By so much less, that it is not to be done for each record.
    pub(crate) fn evict(&self) -> Vec<EvictedAnswer> {
        let mut dropped = Vec::new();
        if self.pending_evictions.fetch_add(1, Ordering::AcqRel) > 0 {
            // Who makes it now looks once more.
            return dropped;
        }
        let mut wanted = 1;
        while wanted > 0 {
            let seen = self.pending_evictions.load(Ordering::Acquire);
            self.evict_once(&mut dropped);
            wanted = self.pending_evictions.fetch_sub(seen, Ordering::AcqRel) - seen;
        }
        dropped
    }

    fn evict_once(&self, dropped: &mut Vec<EvictedAnswer>) {
        let totals = &self.sessions.common.totals;
        let most = totals.max_bytes();
        if totals.bytes() <= most {
            return;
        }
        let target = most - most / 8;
        for rank in DeliveryState::ALL {
            let Some(too_much) = totals.bytes().checked_sub(target) else {
                break;
            };
            if totals.bytes_of(rank) == 0 {
                continue;
            }
            let mut holders = self.candidates(rank);
            let level = eviction_threshold(holders.iter().map(|holder| holder.bytes), too_much);
            holders.retain(|holder| holder.bytes > level);
            holders.sort_by_key(|holder| holder.earliest_expiry);
            for holder in holders {
                if totals.bytes() <= target {
                    break;
                }
                dropped.extend(holder.entry.with(|core| {
                    core.shrink_retained(rank, level);
                    core.take_evicted()
                }));
            }
        }
    }

    fn candidates(&self, rank: DeliveryState) -> Vec<EvictionCandidate<T>> {
        let holders = self.sessions.entries().filter_map(|home| {
            let (bytes, until) =
                home.read(|core| (core.bytes_of(rank), core.earliest_expiry(rank)));
            (bytes > 0).then_some(EvictionCandidate {
                entry: home,
                bytes,
                earliest_expiry: until,
            })
        });
        holders.collect()
    }
}

/// The level to which the larger ones are cut so that `too_much` is cut off, or 0.
fn eviction_threshold(sizes: impl Iterator<Item = usize>, too_much: usize) -> usize {
    let mut sizes: Vec<usize> = sizes.collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    let smaller = sizes.iter().skip(1).copied().chain([0]);
    let mut cut = 0;
    for (count, (size, next)) in (1..).zip(sizes.iter().zip(smaller)) {
        let step = count * (size - next);
        if cut + step >= too_much {
            return size - (too_much - cut).div_ceil(count);
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
