//! Removes a body's byte order mark if bytes have been injected before the body.

use bytes::{Buf, Bytes};

use super::lines::BOM;

/// Forwards a body, and removes its byte order mark (BOM) after an injection.
///
/// A BOM is only recognised at the very start of a stream, so after an injected message it would be part of the first line. A BOM
/// can be split across frames, so bytes that might turn out to be a BOM are held back.
#[derive(Debug, Default)]
pub(crate) enum BomFilter {
    /// Nothing has been sent yet.
    #[default]
    AtStart,
    /// A message has been injected. `held` bytes of a BOM have been received and are being held back.
    AfterInjection { held: u8 },
    /// Bytes of the body have been sent.
    Body,
}

// === impl BomFilter ===

impl BomFilter {
    /// Records that a message has been injected.
    pub(crate) fn record_injection(&mut self) {
        if let Self::AtStart = self {
            *self = Self::AfterInjection { held: 0 };
        }
    }

    /// Returns the bytes to send for a frame: any held-back bytes, followed by the frame.
    ///
    /// No bytes are returned while they might belong to a BOM, and a complete BOM is removed. Bytes still held back when the body
    /// ends are dropped.
    pub(crate) fn filter(&mut self, mut frame: Bytes) -> Bytes {
        if frame.is_empty() {
            return frame;
        }
        let Self::AfterInjection { held } = *self else {
            *self = Self::Body;
            return frame;
        };
        let (received, left) = BOM.split_at_checked(held.into()).unwrap_or_default();
        let matched = frame.iter().zip(left).take_while(|(a, b)| a == b).count();
        if matched == frame.len() && matched < left.len() {
            // The frame ends before it is clear whether this is a BOM.
            *self = Self::AfterInjection {
                held: held + matched as u8,
            };
            return Bytes::new();
        }
        *self = Self::Body;
        if matched == left.len() {
            frame.advance(matched);
            return frame;
        }
        // It was not a BOM after all.
        match received {
            [] => frame,
            received => [received, &frame].concat().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &[u8] = b"data: 1\n\n";

    fn filter_all(filter: &mut BomFilter, frames: &[&'static [u8]]) -> Vec<u8> {
        let frames = frames.iter().map(|frame| Bytes::from_static(frame));
        frames.flat_map(|frame| filter.filter(frame)).collect()
    }

    fn filter_after_injection(frames: &[&'static [u8]]) -> Vec<u8> {
        let mut filter = BomFilter::default();
        filter.record_injection();
        filter_all(&mut filter, frames)
    }

    #[test]
    fn a_bom_after_an_injection_is_removed_however_it_is_split() {
        let table: [&[&[u8]]; 4] = [
            &[b"\xef\xbb\xbfdata: 1\n\n"],
            &[b"\xef\xbb\xbf", EVENT],
            &[b"\xef", b"\xbb", b"\xbf", EVENT],
            &[b"\xef\xbb", b"", b"\xbfdata", b": 1\n\n"],
        ];
        for frames in table {
            assert_eq!(filter_after_injection(frames), EVENT, "{frames:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_a_bom_are_kept_however_they_are_split() {
        let table: [&[&[u8]]; 6] = [
            &[EVENT],
            &[b"\xef\xbbdata", b": 1\n\n"],
            &[b"\xef", b"\xbb", EVENT],
            &[b"\xef", b"\xbb\xbb"],
            &[b"\n\xef\xbb\xbf", EVENT],
            &[EVENT, b"\xef\xbb\xbf"],
        ];
        for frames in table {
            assert_eq!(
                filter_after_injection(frames),
                frames.concat(),
                "{frames:?}"
            );
        }
    }

    #[test]
    fn only_one_of_two_boms_is_removed() {
        let frames = [b"\xef\xbb\xbf\xef" as &[u8], b"\xbb\xbf"];
        assert_eq!(filter_after_injection(&frames), "\u{feff}".as_bytes());
    }

    #[test]
    fn an_empty_frame_is_not_the_start_of_a_body() {
        let mut filter = BomFilter::default();
        assert!(filter.filter(Bytes::new()).is_empty());
        filter.record_injection();
        assert_eq!(
            filter_all(&mut filter, &[b"", b"\xef\xbb\xbf", EVENT]),
            EVENT
        );
    }

    #[test]
    fn a_body_before_any_injection_keeps_its_bom() {
        let mut filter = BomFilter::default();
        assert_eq!(filter_all(&mut filter, &[b"\xef"]), b"\xef");
        filter.record_injection();
        assert_eq!(
            filter_all(&mut filter, &[b"\xbb\xbf", EVENT]).len(),
            2 + EVENT.len()
        );
    }
}
