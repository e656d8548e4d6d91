//! The shelf of a session, which has the texts of its small answers, one behind the other.
//!
//! An answer kept as it is would be a handful of small blocks that lie for a minute among those that come and go with every
//! call. That slows an allocator down by more than all of this crate costs.

use std::sync::Mutex;

use bytes::{Bytes, BytesMut};

use crate::lock::lock;

/// How many bytes of texts share an allocation, which lives as long as the last of them.
const BOARD: usize = 4096;

#[derive(Debug, Default)]
pub(in crate::mcp) struct Shelf(Mutex<BytesMut>);

// === impl Shelf ===

impl Shelf {
    pub(in crate::mcp) fn put(&self, text: &str) -> Bytes {
        let mut board = lock(&self.0);
        if board.capacity() < text.len() {
            *board = BytesMut::with_capacity(BOARD.max(text.len()));
        }
        board.extend_from_slice(text.as_bytes());
        board.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_lie_side_by_side_and_stay_when_there_is_no_more_room() {
        let shelf = Shelf::default();
        let texts: Vec<String> = (0..1_000).map(|n| format!("text {n}")).collect();
        let kept: Vec<Bytes> = texts.iter().map(|text| shelf.put(text)).collect();
        assert_eq!(kept, texts);
        assert_eq!(
            kept[0].as_ptr().wrapping_add(kept[0].len()),
            kept[1].as_ptr()
        );
    }

    #[test]
    fn a_text_longer_than_a_board_gets_one_of_its_own() {
        let shelf = Shelf::default();
        let long = "x".repeat(2 * BOARD);
        assert_eq!(shelf.put(&long), long);
        assert_eq!(shelf.put("short"), "short");
    }
}
