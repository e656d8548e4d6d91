//! Splits a server's stdout, cut into any pieces, into lines. The lines must equal a naive reader's, in bounded
//! memory. A line may only be sent to the stream of the call whose id or token it has, or to the only call's.

#![no_main]

use std::{collections::HashSet, iter};

use fuzz::{choices::Choices, frames};
use libfuzzer_sys::fuzz_target;
use mcp_cancel_proxy::{
    message::{IdKey, Kind, Message},
    stdio::{
        lines::{Line, Lines},
        routing::{Refused, Route, Routes},
    },
};

/// The maximum length of a line, short enough that some lines exceed it.
const LONGEST: usize = 256;

const IDS: [&str; 5] = ["1", "1.0", "\"1\"", "2", "\"a\""];

struct NotStarted;

impl From<Refused> for NotStarted {
    fn from(_: Refused) -> Self {
        Self
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((decisions, rest)) = bytes.split_first() else {
        return;
    };
    let (decisions, text) = rest.split_at((usize::from(*decisions) % 64).min(rest.len()));
    let mut choices = Choices::new(decisions);
    let calls: Vec<&str> = IDS.into_iter().filter(|_| choices.one_of(2) == 0).collect();
    let pieces = frames::cut(text, &mut choices);

    let lines = cut(pieces.iter().map(|piece| &**piece));
    compare(text, &lines);
    route(&calls, &lines);
});

fn cut<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Line> {
    let mut lines = Lines::new(LONGEST);
    let mut read = Vec::new();
    for piece in pieces {
        lines.buffer().extend_from_slice(piece);
        read.extend(iter::from_fn(|| lines.next_line()));
        assert!(lines.buffer().len() <= LONGEST, "it keeps more than a line");
    }
    read.extend(lines.last_line());
    read
}

fn compare(text: &[u8], lines: &[Line]) {
    let expected = text.split(|byte| *byte == b'\n').filter_map(|line| {
        let trimmed = line.trim_ascii();
        if line.len() > LONGEST {
            Some(None)
        } else {
            (!trimmed.is_empty()).then_some(Some(trimmed))
        }
    });
    let received = lines.iter().map(|line| match line {
        Line::Whole(line) => Some(&**line),
        Line::TooLong { .. } => None,
    });
    assert!(received.eq(expected), "{lines:?}");
}

fn route(calls: &[&str], lines: &[Line]) {
    let mut routes = Routes::new(None);
    let mut open = HashSet::new();
    for (stream, id) in calls.iter().enumerate() {
        let id = IdKey::of(id).expect("an id");
        let started = routes.begin(id.clone(), Some(id), || Ok::<_, NotStarted>(stream));
        if started.is_ok() {
            open.insert(stream);
        }
    }
    for line in lines {
        let Line::Whole(line) = line else { continue };
        let Some(message) = Message::read(line) else {
            continue;
        };
        let id_of = |stream: usize| calls.get(stream).and_then(|id| IdKey::of(id));
        match routes.route(&message) {
            Route::Answer(stream) => {
                assert!(open.remove(&stream), "it is answered twice");
                assert_eq!(message.kind, Kind::Response);
                let (answered, call) = (message.id.zip(calls.get(stream))).expect("ids");
                assert!(
                    answers(answered, call, calls),
                    "it is the answer to another call"
                );
            }
            Route::Call(stream) => {
                assert!(open.contains(&stream), "the call has ended");
                let token = message.params().progress_token.and_then(IdKey::of);
                let is_progress_of_call = message.method.as_deref()
                    == Some("notifications/progress")
                    && token == id_of(stream);
                assert!(is_progress_of_call || open.len() == 1, "it is a guess");
            }
            Route::Standalone => assert_ne!(message.kind, Kind::Response),
            Route::Dropped => {}
        }
    }
    let mut left = routes.end();
    left.sort_unstable();
    let mut open: Vec<_> = open.into_iter().collect();
    open.sort_unstable();
    assert_eq!(left, open, "a call was forgotten");
}

/// Returns `true` if an answer with the id `id` may belong to `call`. A number equals its text as long as no call has
/// an id of the answer's type.
fn answers(id: &str, call: &str, calls: &[&str]) -> bool {
    let is_text = |id: &str| id.starts_with('"');
    if IdKey::of(id) == IdKey::of(call) {
        return true;
    }
    if calls.iter().any(|call| is_text(call) == is_text(id)) {
        return false;
    }
    let (text, number) = if is_text(id) { (id, call) } else { (call, id) };
    let text: String = serde_json::from_str(text).expect("a string");
    IdKey::of(&text) == IdKey::of(number)
}
