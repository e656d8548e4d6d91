//! The start of a body, before which a probe may have been added.

use bytes::{Buf, Bytes};

use super::lines::BOM;

/// Passes a body on so that it may follow what was put in before it.
///
/// A byte order mark counts only at the very start. After something else it would be a part of the first line, so
/// it is removed. Frames may cut it: what could still become one is held back.
#[derive(Debug, Default)]
pub(crate) enum BomFilter {
    /// Nothing was sent.
    #[default]
    AtStart,
    /// Something was put in. Of a mark this many bytes have come.
    AfterInjection { held: u8 },
    /// Bytes of the body were sent.
    Body,
}

// === impl BomFilter ===

impl BomFilter {
    /// Something is put in.
    pub(crate) fn after_injection(&mut self) {
        if let Self::AtStart = self {
            *self = Self::AfterInjection { held: 0 };
        }
    }

    /// What is to be sent for the next frame of the body. What is held back at the end of the body is dropped.
    pub(crate) fn filter(&mut self, mut frame: Bytes) -> Bytes {
        if frame.is_empty() {
            return frame;
        }
        let Self::AfterInjection { held } = *self else {
            *self = Self::Body;
            return frame;
        };
        let (came, left) = BOM.split_at_checked(held.into()).unwrap_or_default();
        let more = frame.iter().zip(left).take_while(|(a, b)| a == b).count();
        if more == frame.len() && more < left.len() {
            *self = Self::AfterInjection {
                held: held + more as u8,
            };
            return Bytes::new();
        }
        *self = Self::Body;
        if more == left.len() {
            frame.advance(more);
            return frame;
        }
        match came {
            [] => frame,
            came => [came, &frame].concat().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &[u8] = b"data: 1\n\n";

    fn passed(start: &mut BomFilter, frames: &[&'static [u8]]) -> Vec<u8> {
        let frames = frames.iter().map(|frame| Bytes::from_static(frame));
        frames.flat_map(|frame| start.filter(frame)).collect()
    }

    fn preceded(frames: &[&'static [u8]]) -> Vec<u8> {
        let mut start = BomFilter::default();
        start.after_injection();
        passed(&mut start, frames)
    }

    #[test]
    fn a_mark_goes_where_something_was_put_in_before_it_however_it_is_cut() {
        let table: [&[&[u8]]; 4] = [
            &[b"\xef\xbb\xbfdata: 1\n\n"],
            &[b"\xef\xbb\xbf", EVENT],
            &[b"\xef", b"\xbb", b"\xbf", EVENT],
            &[b"\xef\xbb", b"", b"\xbfdata", b": 1\n\n"],
        ];
        for frames in table {
            assert_eq!(preceded(frames), EVENT, "{frames:?}");
        }
    }

    #[test]
    fn what_is_no_mark_stays_however_it_is_cut() {
        let table: [&[&[u8]]; 6] = [
            &[EVENT],
            &[b"\xef\xbbdata", b": 1\n\n"],
            &[b"\xef", b"\xbb", EVENT],
            &[b"\xef", b"\xbb\xbb"],
            &[b"\n\xef\xbb\xbf", EVENT],
            &[EVENT, b"\xef\xbb\xbf"],
        ];
        for frames in table {
            assert_eq!(preceded(frames), frames.concat(), "{frames:?}");
        }
    }

    #[test]
    fn of_two_marks_one_goes() {
        let frames = [b"\xef\xbb\xbf\xef" as &[u8], b"\xbb\xbf"];
        assert_eq!(preceded(&frames), "\u{feff}".as_bytes());
    }

    #[test]
    fn an_empty_frame_begins_no_body() {
        let mut start = BomFilter::default();
        assert!(start.filter(Bytes::new()).is_empty());
        start.after_injection();
        assert_eq!(passed(&mut start, &[b"", b"\xef\xbb\xbf", EVENT]), EVENT);
    }

    #[test]
    fn a_body_that_came_first_keeps_its_mark() {
        let mut start = BomFilter::default();
        assert_eq!(passed(&mut start, &[b"\xef"]), b"\xef");
        start.after_injection();
        assert_eq!(
            passed(&mut start, &[b"\xbb\xbf", EVENT]).len(),
            2 + EVENT.len()
        );
    }
}
