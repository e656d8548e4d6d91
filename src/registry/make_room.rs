//! The choice of what to forget when all sessions together remember too much.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;

use super::{Dropped, Home, Registry, Tracked, core::Rank};

/// A session that remembers something.
struct Holder<T> {
    home: Arc<Home<T>>,
    bytes: usize,
    /// When the oldest of it is forgotten anyway.
    until: Option<Instant>,
}

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Has the sessions that hold the most forget their oldest records, spare ones first, until all together hold
    /// seven eighths of what they may. Returns what a client may still come for.
    ///
    /// By so much less, that it is not to be done for each record.
    pub(crate) fn make_room(&self) -> Vec<Dropped> {
        let mut dropped = Vec::new();
        if self.want_room.fetch_add(1, Ordering::AcqRel) > 0 {
            // Who makes it now looks once more.
            return dropped;
        }
        let mut wanted = 1;
        while wanted > 0 {
            let seen = self.want_room.load(Ordering::Acquire);
            self.make_room_once(&mut dropped);
            wanted = self.want_room.fetch_sub(seen, Ordering::AcqRel) - seen;
        }
        dropped
    }

    fn make_room_once(&self, dropped: &mut Vec<Dropped>) {
        let totals = &self.street.common.totals;
        let most = totals.most_bytes();
        if totals.bytes() <= most {
            return;
        }
        let target = most - most / 8;
        for rank in Rank::ALL {
            let Some(too_much) = totals.bytes().checked_sub(target) else {
                break;
            };
            if totals.bytes_of(rank) == 0 {
                continue;
            }
            let mut holders = self.holders(rank);
            let level = level(holders.iter().map(|holder| holder.bytes), too_much);
            holders.retain(|holder| holder.bytes > level);
            holders.sort_by_key(|holder| holder.until);
            for holder in holders {
                if totals.bytes() <= target {
                    break;
                }
                dropped.extend(holder.home.with(|core| {
                    core.shrink_memory(rank, level);
                    core.take_dropped()
                }));
            }
        }
    }

    fn holders(&self, rank: Rank) -> Vec<Holder<T>> {
        let holders = self.street.homes().filter_map(|home| {
            let (bytes, until) = home.peek(|core| (core.bytes_of(rank), core.forgotten_at(rank)));
            (bytes > 0).then_some(Holder { home, bytes, until })
        });
        holders.collect()
    }
}

/// The level to which the larger ones are cut so that `too_much` is cut off, or 0.
fn level(sizes: impl Iterator<Item = usize>, too_much: usize) -> usize {
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
        assert_eq!(level([10, 4, 7].into_iter(), 3), 7);
        assert_eq!(level([10, 4, 7].into_iter(), 5), 6);
        assert_eq!(level([10, 4, 7].into_iter(), 9), 4);
        assert_eq!(level([10, 4, 7].into_iter(), 10), 3);
        assert_eq!(level([10, 4, 7].into_iter(), 21), 0);
        assert_eq!(level([10, 4, 7].into_iter(), 22), 0);
        assert_eq!(level([].into_iter(), 1), 0);
    }
}
