//! Where a session puts the texts of its small answers, one behind the other.
//!
//! Each answer kept as it is would be a handful of small blocks that lie for a minute among those that come and go
//! with every call, and an allocator that has to find its way around them is slower than all of this crate.

use std::sync::{Mutex, PoisonError};

use bytes::{Bytes, BytesMut};

/// How many bytes of texts share an allocation, which lives as long as the last of them.
const BOARD: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Shelf(Mutex<BytesMut>);

// === impl Shelf ===

impl Shelf {
    pub(super) fn put(&self, text: &str) -> Bytes {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if board.capacity() < text.len() {
            *board = BytesMut::with_capacity(BOARD.max(text.len()));
        }
        board.extend_from_slice(text.as_bytes());
        board.split().freeze()
    }
}
