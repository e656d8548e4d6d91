//! The places where the standard allows probes.
//!
//! They are computed from the whole text so far instead of byte by byte.

use bytes::Bytes;

use super::Script;

const MARK: &[u8] = "\u{feff}".as_bytes();

pub(super) const PROBE: &[u8] = b":\n\n";

/// A part of what a client receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Probe,
    /// Bytes from the inner body, however they are cut.
    Inner(Vec<u8>),
}

/// Returns the expected pieces for frames that follow a script.
///
/// There is a probe for each interval of silence that starts between two events, and no others.
pub(super) fn expected((frames, last): &Script) -> Vec<Piece> {
    let text: Vec<u8> = frames.iter().flat_map(|(_, frame)| frame.clone()).collect();
    let before = frames.iter().take_while(|(_, frame)| frame.is_empty());
    let first = frames.iter().find(|(_, frame)| !frame.is_empty());
    let first = first.map_or(*last, |(silence, _)| *silence);
    let probed_first = first > 0 || before.into_iter().any(|(silence, _)| *silence > 0);
    // A byte order mark only counts at the start of a body. After a probe it would be text, so it is removed.
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

/// Splits what a client has received into pieces.
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

/// Returns `true` if a frame is a probe. No inner body in these tests has such a frame.
pub(super) fn is_probe(frame: &[u8]) -> bool {
    frame == PROBE
}

/// Returns the body without its byte order mark.
///
/// The result is empty if the body is only a part of the mark.
pub(super) fn without_mark(text: &[u8]) -> &[u8] {
    if MARK.starts_with(text) {
        &[]
    } else {
        text.strip_prefix(MARK).unwrap_or(text)
    }
}

/// Returns `true` if `text` ends at the start of a line and outside an event.
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
