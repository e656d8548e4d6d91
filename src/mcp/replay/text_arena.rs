//! An arena for the text of a session's small answers.
//!
//! Without it, each retained answer would consist of a few small allocations that live for a minute among short-lived
//! allocations. That would slow down the allocator, and cost more than everything else this crate does.

use std::sync::Mutex;

use bytes::{Bytes, BytesMut};

use crate::lock::lock;

/// Size of a chunk, which several texts share. A chunk is freed along with the last of its texts.
const CHUNK_SIZE: usize = 4096;

#[derive(Debug, Default)]
pub(in crate::mcp) struct TextArena(Mutex<BytesMut>);

// === impl TextArena ===

impl TextArena {
    pub(in crate::mcp) fn push(&self, text: &str) -> Bytes {
        let mut chunk = lock(&self.0);
        if chunk.capacity() < text.len() {
            *chunk = BytesMut::with_capacity(CHUNK_SIZE.max(text.len()));
        }
        chunk.extend_from_slice(text.as_bytes());
        chunk.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_adjacent_and_survive_a_new_chunk() {
        let arena = TextArena::default();
        let texts: Vec<String> = (0..1_000).map(|n| format!("text {n}")).collect();
        let stored: Vec<Bytes> = texts.iter().map(|text| arena.push(text)).collect();
        assert_eq!(stored, texts);
        assert_eq!(
            stored[0].as_ptr().wrapping_add(stored[0].len()),
            stored[1].as_ptr()
        );
    }

    #[test]
    fn a_text_longer_than_a_chunk_gets_its_own() {
        let arena = TextArena::default();
        let long = "x".repeat(2 * CHUNK_SIZE);
        assert_eq!(arena.push(&long), long);
        assert_eq!(arena.push("short"), "short");
    }
}
