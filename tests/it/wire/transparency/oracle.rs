//! The places where probes must be, by the words of the standard: from the whole text so far, not byte by byte.

use bytes::Bytes;

use super::Script;

const MARK: &[u8] = "\u{feff}".as_bytes();

pub(super) const PROBE: &[u8] = b":\n\n";

/// What a client gets between two others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Probe,
    /// Bytes of the inner body, however they are cut.
    Inner(Vec<u8>),
}

/// What comes of frames that follow a script: a probe for each interval of silence that begins between two
/// events, and nothing else.
pub(super) fn expected((frames, last): &Script) -> Vec<Piece> {
    let text: Vec<u8> = frames.iter().flat_map(|(_, frame)| frame.clone()).collect();
    let before = frames.iter().take_while(|(_, frame)| frame.is_empty());
    let first = frames.iter().find(|(_, frame)| !frame.is_empty());
    let first = first.map_or(*last, |(silence, _)| *silence);
    let probed_first = first > 0 || before.into_iter().any(|(silence, _)| *silence > 0);
    // Of the start of a body a mark is part, of what comes after a probe it is not.
    let mut skip = if probed_first {
        text.len() - without_mark(&text).len()
    } else {
        0
    };
    let mut expected = Vec::new();
    let mut length = 0;
    for (silence, frame) in frames {
        put_probes(&mut expected, *silence, &text[..length]);
        length += frame.len();
        let skipped = skip.min(frame.len());
        skip -= skipped;
        append(&mut expected, &frame[skipped..]);
    }
    put_probes(&mut expected, *last, &text);
    expected
}

fn put_probes(pieces: &mut Vec<Piece>, silence: u32, text: &[u8]) {
    if is_boundary(text) {
        pieces.extend((0..silence).map(|_| Piece::Probe));
    }
}

/// What a client got.
pub(super) fn pieces(frames: &[Bytes]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for frame in frames {
        if is_probe(frame) {
            pieces.push(Piece::Probe)
        } else {
            append(&mut pieces, frame)
        }
    }
    pieces
}

fn append(pieces: &mut Vec<Piece>, frame: &[u8]) {
    match pieces.last_mut() {
        _ if frame.is_empty() => {}
        Some(Piece::Inner(bytes)) => bytes.extend_from_slice(frame),
        _ => pieces.push(Piece::Inner(frame.to_vec())),
    }
}

/// Whether a frame is a probe. No inner body here has such a frame.
pub(super) fn is_probe(frame: &[u8]) -> bool {
    frame == PROBE
}

/// The body without its mark, or what of one is all of it.
pub(super) fn without_mark(text: &[u8]) -> &[u8] {
    if MARK.starts_with(text) {
        &[]
    } else {
        text.strip_prefix(MARK).unwrap_or(text)
    }
}

/// Whether nothing of an event has come since the last blank line.
pub(super) fn is_boundary(text: &[u8]) -> bool {
    let mut rest = text.strip_prefix(MARK).unwrap_or(text);
    let mut in_event = false;
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        match &rest[..end] {
            [] => in_event = false,
            [b':', ..] => {}
            _ => in_event = true,
        }
        let is_pair = rest[end..].starts_with(b"\r\n");
        rest = &rest[end + if is_pair { 2 } else { 1 }..];
    }
    rest.is_empty() && !in_event
}
