//! Splits text into frames.

use bytes::Bytes;

use crate::choices::Choices;

/// Splits a text according to the choices. With zeros it stays whole.
pub fn cut(text: &[u8], choices: &mut Choices<'_>) -> Vec<Bytes> {
    let mut rest = Bytes::copy_from_slice(text);
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let length = match choices.byte() {
            0 => rest.len(),
            // An empty frame.
            255 => 0,
            // Small pieces are where readers fail; large ones get to the end of the text.
            byte @ 1..128 => usize::from(byte).min(rest.len()),
            byte => (usize::from(byte) << 3).min(rest.len()),
        };
        frames.push(rest.split_to(length));
    }
    frames
}
