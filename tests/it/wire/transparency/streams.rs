//! Generated event streams, both valid and invalid, and the frames into which they are cut.

use std::{iter, ops::Range};

use proptest::{
    collection::vec,
    option,
    prelude::*,
    sample::{Index, select},
};

use super::oracle::PROBE;

/// A place where a stream is cut.
#[derive(Clone, Debug)]
pub(super) enum Cut {
    Anywhere(Index),
    /// After a line end.
    AfterLine(Index),
    /// This many bytes after the start, where there may be a byte order mark.
    Early(usize),
    /// After every byte.
    Everywhere,
}

/// Generates events with all fields that a server can write. The last event may be incomplete.
pub(super) fn stream_of_events() -> impl Strategy<Value = Vec<u8>> {
    let line_ends = prop_oneof![
        2 => Just(vec!["\n"]),
        1 => Just(vec!["\r\n"]),
        1 => Just(vec!["\r"]),
        1 => vec(select(vec!["\n", "\r\n", "\r"]), 1..6),
    ];
    let end = option::weighted(0.3, any::<Index>());
    (mark(), vec(event(), 0..6), line_ends, end).prop_map(|(mark, events, line_ends, end)| {
        let mut text = mark.to_vec();
        let lines = events.into_iter().flatten();
        for (line, line_end) in lines.zip(line_ends.iter().cycle()) {
            text.extend(line.bytes());
            text.extend(line_end.bytes());
        }
        if let Some(end) = end {
            text.truncate(end.index(text.len() + 1));
        }
        text
    })
}

/// Generates one byte order mark, part of one, two of them, or none.
fn mark() -> impl Strategy<Value = &'static [u8]> {
    let marks: [&[u8]; 7] = [
        b"",
        b"",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf",
        b"\xef",
        b"\xef\xbb",
        b"\xef\xbb\xbf\xef\xbb\xbf",
    ];
    select(marks.to_vec())
}

/// Generates an event's lines, with the blank line last.
fn event() -> impl Strategy<Value = Vec<String>> {
    let value = || "[a-z0-9/:{}\" é]{0,12}";
    let fields = (
        option::of(value()),
        option::weighted(0.3, any::<u32>()),
        option::weighted(0.2, "[a-z]{0,6}"),
        vec(value(), 0..4),
        vec(" ?[a-z: ]{1,4}", 0..2),
        any::<bool>(),
    );
    let lines = fields.prop_map(|(id, retry, kind, data, comments, space)| {
        let space = if space { " " } else { "" };
        let line = |name: &str, value: String| format!("{name}:{space}{value}");
        let id = id.into_iter().map(|id| line("id", id));
        let retry = retry
            .into_iter()
            .map(|retry| line("retry", retry.to_string()));
        let kind = kind.into_iter().map(|kind| line("event", kind));
        let data = data.into_iter().map(|data| line("data", data));
        let comments = comments.into_iter().map(|comment| format!(":{comment}"));
        id.chain(retry)
            .chain(kind)
            .chain(data)
            .chain(comments)
            .collect::<Vec<_>>()
    });
    let lines = prop_oneof![
        8 => lines.prop_shuffle(),
        1 => Just(Vec::new()),
        1 => Just(vec![": ping".to_owned()]),
    ];
    lines.prop_map(|mut lines| {
        lines.push(String::new());
        lines
    })
}

/// Generates text that no server would write.
///
/// It has many bytes that decide where an event ends, but never contains a probe.
pub(super) fn noise() -> impl Strategy<Value = Vec<u8>> {
    let fragments: [&[u8]; 18] = [
        b"\n",
        b"\n",
        b"\n\n",
        b"\r",
        b"\r",
        b"\r\n",
        b"\r\n\r\n",
        b":-",
        b" ",
        b"data",
        b"data: x",
        b"id: 1",
        b"retry: 1",
        b"\0",
        b"\xef\xbb\xbf",
        b"\xef",
        b"\xbb",
        b"\xbf",
    ];
    vec(select(fragments.to_vec()), 0..24).prop_map(|fragments| fragments.concat())
}

pub(super) fn cuts() -> impl Strategy<Value = Vec<Cut>> {
    let cut = prop_oneof![
        1 => any::<Index>().prop_map(Cut::Anywhere),
        2 => any::<Index>().prop_map(Cut::AfterLine),
        1 => (0_usize..5).prop_map(Cut::Early),
    ];
    prop_oneof![6 => vec(cut, 0..12), 1 => Just(vec![Cut::Everywhere])]
}

pub(super) fn cut<'a>(text: &'a [u8], cuts: &[Cut]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = cuts.iter().flat_map(|cut| cut.places(text)).collect();
    places.sort_unstable();
    // No frame may look like a probe.
    places.retain(|place| !text[*place..].starts_with(PROBE));
    let starts = iter::once(0).chain(places.clone());
    let ends = places.iter().copied().chain([text.len()]);
    starts
        .zip(ends)
        .map(|(start, end)| &text[start..end])
        .collect()
}

// === impl Cut ===

impl Cut {
    fn places(&self, text: &[u8]) -> Range<usize> {
        let place = match self {
            Self::Everywhere => return 0..text.len(),
            Self::Anywhere(index) => index.index(text.len() + 1),
            Self::Early(place) => (*place).min(text.len()),
            Self::AfterLine(index) => {
                let after = |start: usize| {
                    let line_end = text[start..].iter().position(|byte| b"\r\n".contains(byte));
                    line_end.map(|end| start + end + 1)
                };
                after(index.index(text.len() + 1)).unwrap_or(text.len())
            }
        };
        place..place + 1
    }
}
