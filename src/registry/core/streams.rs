//! The event ids of a call: what its client may resume with.
//!
//! rmcp writes `<index>/<stream>`, and any event of a stream names that stream. Ids of other servers may look the same and mean
//! something else (`<stream>/<index>`, or a constant after the slash), so they name only the stream they were seen on
//! ([`EventIdFormat`]). Consecutive ids, as those of rmcp behind a proxy, are stored as one.

use std::collections::VecDeque;

use super::index::{EventId, StreamId};

/// Maximum number of known event ids of a call, of the first and of the latest ones each: 1,024. They take at most 16 KiB a call.
/// Consecutive ids count as one.
pub(crate) const MAX_EVENT_IDS: usize = 1_024;

/// The format of a server's event ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventIdFormat {
    /// That of rmcp: the number after the slash names the stream.
    Rmcp,
    /// Any other: each event id names the stream that it was seen on.
    Any,
}

/// The known event ids of a call's streams.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Nearly always the only one. It needs no allocation.
    first: Option<FirstIds>,
    overflow: Option<Box<OverflowIds>>,
}

#[derive(Debug, Clone, Copy)]
enum FirstIds {
    Stream(StreamId),
    /// The events `<index>/<stream>` from one index to another, in this order.
    Run {
        stream: u64,
        from: u32,
        to: u32,
    },
}

/// The event ids after the first, which few calls have.
#[derive(Debug, Default)]
struct OverflowIds {
    /// The ids after the first.
    first: Vec<StreamId>,
    latest: VecDeque<StreamId>,
    /// Set when the known ids are incomplete.
    is_incomplete: bool,
}

// === impl Streams ===

impl Streams {
    /// Adds an id. Returns `None` if it is known, otherwise the id that was removed for it.
    pub(super) fn add(&mut self, stream: StreamId) -> Option<Option<StreamId>> {
        if self.first.is_none() {
            self.first = Some(FirstIds::Stream(stream));
            return Some(None);
        }
        if self.iter().any(|known| known == stream) {
            return None;
        }
        let more = self.overflow.get_or_insert_default();
        if more.first.len() < MAX_EVENT_IDS - 1 {
            more.first.push(stream);
            return Some(None);
        }
        more.latest.push_back(stream);
        if more.latest.len() <= MAX_EVENT_IDS {
            return Some(None);
        }
        more.is_incomplete = true;
        Some(more.latest.pop_front())
    }

    /// Starts a run with the first known event. Returns `false` if there are other ids.
    pub(super) fn start_run(&mut self, index: u64, stream: u64) -> bool {
        let Ok(at) = u32::try_from(index) else {
            return false;
        };
        if self.first.is_none() {
            self.first = Some(FirstIds::Run {
                stream,
                from: at,
                to: at,
            });
            return true;
        }
        false
    }

    /// Adds an event to the run. Returns `false` if the event does not continue the run.
    pub(super) fn continue_run(&mut self, index: u64, stream: u64) -> bool {
        match &mut self.first {
            Some(FirstIds::Run {
                stream: known,
                from,
                to,
            }) if *known == stream => {
                if u64::from(*to) + 1 == index
                    && let Ok(index) = u32::try_from(index)
                {
                    *to = index;
                }
                (u64::from(*from)..=u64::from(*to)).contains(&index)
            }
            _ => false,
        }
    }

    /// Records that the known ids are incomplete.
    pub(super) fn mark_incomplete(&mut self) {
        self.overflow.get_or_insert_default().is_incomplete = true;
    }

    pub(super) fn is_incomplete(&self) -> bool {
        self.overflow
            .as_ref()
            .is_some_and(|more| more.is_incomplete)
    }

    /// Returns `true` if an event belongs to one of these streams.
    pub(super) fn contains(&self, event: EventId) -> bool {
        if let Some(FirstIds::Run { stream, from, to }) = self.first
            && let Some((index, of)) = event.numbers
        {
            let run = u64::from(from)..=u64::from(to);
            if of == stream && run.contains(&index) {
                return true;
            }
        }
        let first = match self.first {
            Some(FirstIds::Stream(first)) => Some(first),
            _ => None,
        };
        let mut known = first.into_iter().chain(self.others());
        known.any(|known| match known {
            StreamId::Numbered(stream) => event.numbers.is_some_and(|(_, of)| of == stream),
            StreamId::Opaque(hash) => event.hash == hash,
        })
    }

    /// The keys of these streams in the index.
    pub(super) fn iter(&self) -> impl Iterator<Item = StreamId> {
        let first = self.first.map(|first| match first {
            FirstIds::Stream(stream) => stream,
            FirstIds::Run { stream, .. } => StreamId::Numbered(stream),
        });
        first.into_iter().chain(self.others())
    }

    fn others(&self) -> impl Iterator<Item = StreamId> {
        let more = self.overflow.iter();
        more.flat_map(|more| more.first.iter().chain(&more.latest).copied())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(index: u64, stream: u64) -> EventId {
        EventId {
            numbers: Some((index, stream)),
            hash: 0,
        }
    }

    #[test]
    fn a_run_has_the_events_that_were_seen_and_no_other() {
        let mut streams = Streams::default();
        assert!(!streams.continue_run(3, 7), "there is none yet");
        assert!(streams.start_run(3, 7));
        assert!(streams.continue_run(4, 7));
        assert!(streams.continue_run(3, 7), "known");
        for unseen in [event(2, 7), event(5, 7), event(3, 8), event(7, 3)] {
            assert!(!streams.contains(unseen), "{unseen:?}");
        }
        assert!(streams.contains(event(3, 7)) && streams.contains(event(4, 7)));
        assert!(!streams.continue_run(6, 7), "a gap");
        assert!(!streams.continue_run(5, 8), "another stream");
        assert!(!streams.start_run(0, 1), "there is one");
        assert_eq!(streams.len(), 1);
    }

    #[test]
    fn a_run_ends_where_its_numbers_do() {
        let mut streams = Streams::default();
        assert!(!streams.start_run(u64::from(u32::MAX) + 1, 0));
        assert!(streams.start_run(u32::MAX.into(), 0));
        assert!(!streams.continue_run(u64::from(u32::MAX) + 1, 0));
        assert!(streams.contains(event(u32::MAX.into(), 0)));
    }
}
