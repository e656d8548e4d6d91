//! A call's event ids, which its client can use to resume.
//!
//! rmcp writes `<index>/<stream>`, so each event id identifies its stream. Other servers' ids may look the same but mean something else
//! (`<stream>/<index>`, or a constant after the slash), so each of them only identifies the stream it was seen on ([`EventIdFormat`]).

use std::collections::VecDeque;

use super::{
    forgotten_ids::ForgottenIds,
    index::{EventId, StreamId},
};

/// Maximum number of event ids stored per call besides the first. They take up to 4 KiB, as does the filter that recognises older ids
/// ([`ForgottenIds`]).
///
/// Only the latest ids are stored, because a resume compares its event id with every id stored for its session.
pub(crate) const MAX_EVENT_IDS: usize = 256;

/// The format of a server's event ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventIdFormat {
    /// rmcp's format, in which the number after the slash identifies the stream.
    Rmcp,
    /// Any other format, in which each event id only identifies the stream it was seen on.
    Other,
}

/// The known event ids of a call's streams.
#[derive(Debug, Default)]
pub(super) struct EventIds {
    /// Nearly always the only id, so it is stored inline.
    first: Option<StreamId>,
    overflow: Option<Box<OverflowIds>>,
}

/// The event ids after the first. Few calls have any.
#[derive(Debug, Default)]
struct OverflowIds {
    latest: VecDeque<StreamId>,
    /// The opaque ids that were removed from `latest`.
    forgotten: Option<Box<ForgottenIds>>,
    /// Whether any unknown id may belong to the call.
    is_incomplete: bool,
}

// === impl EventIds ===

impl EventIds {
    /// Adds an id, unless it is already known. Beyond [`MAX_EVENT_IDS`], the oldest id other than the first is removed.
    pub(super) fn add(&mut self, stream: StreamId) {
        if self.first.is_none() {
            self.first = Some(stream);
            return;
        }
        if self.iter().any(|known| known == stream) {
            return;
        }
        let overflow = self.overflow.get_or_insert_default();
        if overflow.latest.len() == MAX_EVENT_IDS {
            match overflow.latest.pop_front() {
                Some(StreamId::Opaque(hash)) => {
                    overflow.forgotten.get_or_insert_default().add(hash);
                }
                // A stream number stands for many event ids, whose hashes are unknown.
                Some(StreamId::Numbered(_)) | None => overflow.is_incomplete = true,
            }
        }
        overflow.latest.push_back(stream);
    }

    pub(super) fn mark_incomplete(&mut self) {
        self.overflow.get_or_insert_default().is_incomplete = true;
    }

    /// Returns `true` if an unknown event may belong to one of these streams.
    pub(super) fn may_contain(&self, event: EventId) -> bool {
        self.overflow.as_ref().is_some_and(|overflow| {
            let forgotten = overflow.forgotten.as_ref();
            overflow.is_incomplete
                || forgotten.is_some_and(|forgotten| forgotten.may_contain(event.hash))
        })
    }

    /// Returns the known ids, for a call that has ended.
    pub(super) fn into_known(mut self) -> Self {
        if let Some(overflow) = &mut self.overflow {
            overflow.forgotten = None;
        }
        self
    }

    /// Returns `true` if an event belongs to one of these streams.
    pub(super) fn contains(&self, event: EventId) -> bool {
        self.iter().any(|known| known.contains(event))
    }

    fn iter(&self) -> impl Iterator<Item = StreamId> {
        let overflow = self.overflow.iter();
        let latest = overflow.flat_map(|overflow| &overflow.latest);
        self.first.iter().chain(latest).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }
}
