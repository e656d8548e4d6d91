use std::{convert::Infallible, iter};

use bytes::Bytes;
use futures_util::{FutureExt, TryStreamExt, stream};
use proptest::{
    collection::vec,
    option,
    prelude::*,
    sample::{Index, select},
};
use serde_json::{Value, json};
use sse_stream::{Sse, SseStream};

use super::*;
use crate::{
    call::RequestId,
    envelope::{Answers, ParseFailure, answers},
};

const MIB: usize = 1024 * 1024;

/// An event that outlives its frame.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    id: Option<Vec<u8>>,
    retry: Option<u64>,
    answers: Answers,
}

// Event content.

#[test]
fn an_answer_is_read_as_rmcp_writes_it() {
    let priming = Sse::default().data("").id("0/0").retry(3000);
    let data = r#"{"jsonrpc":"2.0","id":0,"result":{"content":[]}}"#;
    let answer = Sse::default().data(data).id("1/0");
    let text = [Bytes::from(priming), Bytes::from(answer)].concat();
    let literal = "data: \nid: 0/0\nretry: 3000\n\n\
        data: {\"jsonrpc\":\"2.0\",\"id\":0,\"result\":{\"content\":[]}}\nid: 1/0\n\n";
    assert_eq!(text, literal.as_bytes());
    assert_events(literal, &[id("0/0").retry(3000), answer_to(0).id("1/0")]);
}

#[test]
fn a_keep_alive_between_events_is_not_an_event() {
    let text = ":\n\n: ping\n\nid: 1\n\n:\n\n:\n:\n";
    assert_events(text, &[id("1")]);
}

#[test]
fn a_priming_event_has_its_id_with_and_without_data() {
    for text in [
        "id: 1\ndata: \n\n",
        "id: 1\ndata:\n\n",
        "id: 1\ndata\n\n",
        "id: 1\n\n",
        "event: message\nid:1\n\n",
        ": primed\nid:1\n: primed\n\n",
    ] {
        assert_events(text, &[id("1")]);
    }
}

#[test]
fn requests_and_notifications_of_the_server_answer_nothing() {
    let text = "id: 5\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n\
        data: {\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\n\n";
    assert_events(text, &[id("5"), nothing()]);
}

#[test]
fn data_that_is_not_a_message_is_ambiguous() {
    for (data, reason) in [
        ("hello", ParseFailure::NotJson),
        ("{", ParseFailure::Truncated),
        (
            r#"[{"jsonrpc":"2.0","id":1,"result":1}]"#,
            ParseFailure::Batch,
        ),
        (
            r#"{"jsonrpc":"2.0","id":null,"error":{}}"#,
            ParseFailure::BadId,
        ),
    ] {
        let text = format!("data: {data}\n\n");
        assert_events(&text, &[with(Answers::Ambiguous(reason))]);
    }
}

#[test]
fn the_type_of_an_event_has_no_effect() {
    let text = "event: other\ndata: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":1}\n\n";
    assert_events(text, &[answer_to(7)]);
}

#[test]
fn data_lines_are_joined_by_line_feeds() {
    // A number or a string cannot contain a line feed, so these are not JSON.
    for (lines, expected) in [
        (
            ["{\"jsonrpc\":\"2.0\",", "\"id\":7,\"result\":1}"],
            answer_to(7),
        ),
        (
            ["", "{\"jsonrpc\":\"2.0\",\"id\":7,\"result\":1}"],
            answer_to(7),
        ),
        (
            ["{\"jsonrpc\":\"2.0\",\"id\":7,\"result\":1}", ""],
            answer_to(7),
        ),
        (
            ["{\"jsonrpc\":\"2.0\",\"result\":1,\"id\":1", "2}"],
            with(Answers::Ambiguous(ParseFailure::NotJson)),
        ),
        (
            ["{\"jsonrpc\":\"2.0\",\"result\":1,\"id\":\"1", "2\"}"],
            with(Answers::Ambiguous(ParseFailure::NotJson)),
        ),
    ] {
        let text = format!("data:{}\nid:x\ndata:{}\n\n", lines[0], lines[1]);
        assert_events(&text, &[expected.id("x")]);
    }
}

// The standard's rules, line by line.

#[test]
fn any_line_ending_ends_a_line() {
    for end in ["\n", "\r", "\r\n"] {
        let lines = ["id: 1", "retry: 5", "", ":", "id: 2", "", ""];
        assert_events(&lines.join(end), &[id("1").retry(5), id("2")]);
    }
    assert_events(
        "id:1\r\n\nid:2\n\rid:3\r\r\nid:4\n\r\n",
        &["1", "2", "3", "4"].map(id),
    );
}

#[test]
fn a_line_feed_after_a_return_is_not_a_blank_line() {
    assert_events("id: 1\r\nretry: 5\r\n\r\n", &[id("1").retry(5)]);
    assert_events("id: 1\r\n", &[]);
}

#[test]
fn an_event_without_a_blank_line_is_not_reported() {
    for text in [
        "id: 1",
        "id: 1\n",
        "id: 1\ndata: {}\nretry: 1",
        "data: {}\n:\n",
    ] {
        assert_events(text, &[]);
    }
}

#[test]
fn a_byte_order_mark_is_skipped_only_at_the_start() {
    assert_events("\u{feff}id: 1\n\n", &[id("1")]);
    assert_events("\u{feff}\nid: 1\n\n", &[id("1")]);
    assert_events("\u{feff}\u{feff}id: 1\nid: 2\n\n", &[id("2")]);
    assert_events("\n\u{feff}id: 1\nid: 2\n\n", &[id("2")]);
    assert_bytes(b"\xef\xbbid: 1\nid: 2\n\n", &[id("2")]);
    assert_bytes(b"\xef\xbb\nid: 2\n\n", &[id("2")]);
    assert_bytes(b"\xefid: 1\n\xbb\xbfid: 1\n\n", &[]);
}

#[test]
fn one_space_after_the_colon_is_not_part_of_the_value() {
    for (line, expected) in [
        ("id:1", "1"),
        ("id: 1", "1"),
        ("id:  1", " 1"),
        ("id: 1 ", "1 "),
        ("id:\t1", "\t1"),
        ("id: ", ""),
        ("id::1", ":1"),
    ] {
        assert_events(&format!("{line}\n\n"), &[id(expected)]);
    }
}

#[test]
fn a_field_is_recognised_by_its_exact_name() {
    for line in [
        "Id: 1",
        "ID: 1",
        " id: 1",
        "id : 1",
        "i: 1",
        "ident: 1",
        "i",
        "dat",
        "retr",
        "idd",
        "x",
        "\0",
        "event: 1",
        "event",
        "retry",
        "data1",
        "retry : 1",
        "é: 1",
    ] {
        assert_events(&format!("{line}\n\n"), &[]);
        assert_events(&format!("{line}\nid: 1\n\n"), &[id("1")]);
    }
}

#[test]
fn a_field_without_a_colon_is_empty() {
    assert_events("id\n\n", &[id("")]);
    assert_events("data\n\n", &[nothing()]);
    assert_events("data\ndata\n\n", &[nothing()]);
    assert_events("retry\n\n", &[]);
}

#[test]
fn a_split_field_name_is_recognised_and_no_other() {
    for (name, is_field) in [
        ("id", true),
        ("id ", false),
        ("i", false),
        ("idd", false),
        ("ix", false),
        ("di", false),
    ] {
        let text = format!("{name}: 1\n\n");
        let expected = is_field.then(|| id("1"));
        for first in 0..text.len() {
            for second in first..text.len() {
                let (frames, last) = text.as_bytes().split_at(second);
                let (before, between) = frames.split_at(first);
                let (seen, _) = read([before, between, last]);
                assert_eq!(
                    seen,
                    Vec::from_iter(expected.clone()),
                    "{text:?} {first} {second}"
                );
            }
        }
    }
}

#[test]
fn a_reader_between_events_keeps_nothing() {
    let mut reader = Reader::default();
    let mut events = 0;
    for frame in [
        "data: 1\nid: 1\nretry: 1\n\n",
        ":\n\n",
        "data\n\n",
        "x: y\n",
        "\n",
    ] {
        reader.read(frame.as_bytes(), |_| events += 1);
        assert!(reader.incomplete.is_none(), "{frame:?}");
    }
    assert_eq!(events, 2);
}

#[test]
fn the_last_id_of_an_event_counts() {
    assert_events("id: 1\nid: 2\n\n", &[id("2")]);
    assert_events("id: 1\nid\n\n", &[id("")]);
}

#[test]
fn an_id_does_not_outlast_its_event() {
    assert_events("id: 1\n\ndata:\n\n", &[id("1"), nothing()]);
}

#[test]
fn an_id_with_a_null_is_ignored() {
    assert_events("id: a\0\n\n", &[]);
    assert_events("id: 1\nid: \0\n\n", &[id("1")]);
    assert_events("id: 1\0\ndata:\n\n", &[nothing()]);
}

#[test]
fn an_id_may_have_any_other_bytes() {
    assert_bytes(
        b"id: \xff\xc3:\x01\n\n",
        &[Seen {
            id: Some(b"\xff\xc3:\x01".to_vec()),
            ..nothing()
        }],
    );
}

#[test]
fn a_retry_field_with_non_digits_is_ignored() {
    for (value, expected) in [
        ("0", Some(0)),
        ("0003000", Some(3000)),
        ("599999", Some(599_999)),
        ("600001", Some(600_001)),
        ("2147483648", Some(2_147_483_647)),
        ("18446744073709551620", Some(2_147_483_647)),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("1s", None),
        (" 1", None),
        ("1 ", None),
        ("0x1", None),
        ("٣", None),
    ] {
        let text = format!("retry: 7\nretry: {value}\n\n");
        assert_events(&text, &[nothing().retry(expected.unwrap_or(7))]);
        let alone: Vec<_> = expected
            .map(|retry| nothing().retry(retry))
            .into_iter()
            .collect();
        assert_events(&format!("retry: {value}\n\n"), &alone);
    }
}

// Where bytes can be injected.

#[test]
fn a_boundary_is_between_two_events() {
    for (text, expected) in [
        ("", true),
        ("\n", true),
        ("\r", true),
        (":", false),
        (": ping", false),
        (": ping\n", true),
        ("i", false),
        ("id: 1\n", false),
        ("id: 1\n\n", true),
        ("id: 1\n:\n", false),
        ("id: 1\r\n\r", true),
        ("id: 1\r\n\r\n", true),
        ("id: 1\r\n", false),
        ("id: 1\n\nid", false),
        ("id\0\n", false),
        ("event: x\n", false),
        ("unknown\n", false),
        ("data\n", false),
        ("retry: x\n", false),
        ("\u{feff}", true),
        ("\u{feff}:\n", true),
        ("\u{feff}id", false),
    ] {
        let mut boundary = Boundary::default();
        boundary.observe(text.as_bytes());
        assert_eq!(boundary.is_at_event_boundary(), expected, "{text:?}");
    }
}

#[test]
fn bytes_injected_at_a_boundary_change_no_event() {
    let text = "\r\n:a\r\nid: 1\r\n:b\r\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":1}\r\n\r\n\
        :\r\n\r\nid: 2\r\rretry: 5\n\n";
    let (events, _) = read([text.as_bytes()]);
    for at in 0..=text.len() {
        let (before, after) = text.as_bytes().split_at(at);
        if !boundary(before) {
            continue;
        }
        let comment = [before, b":\n\n", after].concat();
        assert_eq!(read([&*comment]).0, events, "{at}");
        let event = [before, b"id: new\n\n", after].concat();
        let (mut more, _) = read([&*event]);
        more.retain(|event| event.id.as_deref() != Some(b"new"));
        assert_eq!(more, events, "{at}");
    }
}

// Limits.

#[test]
fn an_event_inside_one_frame_is_read_whatever_its_length() {
    let text = long_answer(5 * MIB);
    let mut reader = Reader::default();
    let mut events = Vec::new();
    reader.read(&text, |event| events.push(Seen::from(event)));
    assert_eq!(events, [answer_to(7).id("1/0")]);
    assert_eq!(allocated(&reader), 0);
}

#[test]
fn a_split_event_is_buffered_up_to_the_limit() {
    let fits = long_answer(4 * MIB);
    let over = long_answer(4 * MIB + 1);
    for size in [1000, 8 * 1024, MIB, 3 * MIB, 4 * MIB + 10] {
        assert_eq!(
            read_in_frames(&fits, size),
            [answer_to(7).id("1/0")],
            "{size}"
        );
        let too_large = with(Answers::Ambiguous(ParseFailure::TooLarge));
        assert_eq!(read_in_frames(&over, size), [too_large.id("1/0")], "{size}");
    }
}

#[test]
fn data_lines_are_buffered_up_to_the_limit_in_one_frame_too() {
    let too_large = with(Answers::Ambiguous(ParseFailure::TooLarge));
    for (second, expected) in [(MIB - 1, nothing()), (MIB, too_large)] {
        let lines = [3 * MIB, second].map(|length| format!("data: {}\n", " ".repeat(length)));
        let text = [&lines.concat(), "id: 1\n\nid: 2\n\n"].concat();
        for size in [text.len(), 8 * 1024] {
            let events = read_in_frames(text.as_bytes(), size);
            assert_eq!(
                events,
                [expected.clone().id("1"), id("2")],
                "{second} {size}"
            );
        }
    }
}

#[test]
fn an_id_over_the_limit_is_ignored() {
    let longest = "x".repeat(512 * 1024);
    let text = format!("id: {longest}\n\nid: 1\nid: {longest}x\n\nretry: {longest}1\n\n");
    for size in [text.len(), 1000, MIB] {
        assert_eq!(
            read_in_frames(text.as_bytes(), size),
            [id(&longest), id("1")],
            "{size}"
        );
    }
}

#[test]
fn events_after_one_that_is_too_long_are_read() {
    let text = [&*long_answer(5 * MIB), &long_answer(MIB)].concat();
    let expected = [
        with(Answers::Ambiguous(ParseFailure::TooLarge)),
        answer_to(7),
    ];
    assert_eq!(
        read_in_frames(&text, 64 * 1024),
        expected.map(|event| event.id("1/0"))
    );
}

/// Returns the number of bytes that a reader has allocated.
fn allocated(reader: &Reader) -> usize {
    reader.incomplete.as_ref().map_or(0, EventBlock::allocated)
}

/// Reads `text` in frames of `size` bytes.
///
/// Asserts that buffers stay within their limits in the meantime, and that none is left at the end.
fn read_in_frames(text: &[u8], size: usize) -> Vec<Seen> {
    let mut reader = Reader::default();
    let mut events = Vec::new();
    for frame in text.chunks(size) {
        reader.read(frame, |event| events.push(Seen::from(event)));
        assert!(allocated(&reader) <= 5 * MIB);
    }
    assert_eq!(allocated(&reader), 0);
    events
}

/// An event that answers request 7, with `length` bytes of data.
fn long_answer(length: usize) -> Vec<u8> {
    let [before, after] = [r#"{"jsonrpc":"2.0","id":7,"result":""#, r#""}"#];
    let text = "x".repeat(length - before.len() - after.len());
    format!("data: {before}{text}{after}\nid: 1/0\n\n").into_bytes()
}

// Properties.

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes_in_any_frames_are_read_as_the_reference_reads_them(
        text in vec(fragment(), 0..24),
        cuts in vec(any::<Index>(), 0..6),
    ) {
        assert_matches_reference(&text.concat(), &cuts)?;
    }

    #[test]
    fn random_bytes_are_read_as_the_reference_reads_them(
        text in vec(any::<u8>(), 0..64),
        cuts in vec(any::<Index>(), 0..6),
    ) {
        assert_matches_reference(&text, &cuts)?;
    }

    #[test]
    fn a_stream_yields_the_written_events(
        parts in vec(part(), 0..8),
        layout in any::<u64>(),
        has_bom in any::<bool>(),
        cuts in vec(any::<Index>(), 0..6),
    ) {
        let mut text = if has_bom { "\u{feff}".to_owned() } else { String::new() };
        Layout(layout).write(&parts, &mut text);
        let expected: Vec<_> = parts.iter().filter_map(Part::event).collect();
        let frames = cut(text.as_bytes(), &cuts);
        prop_assert_eq!(&read(frames.iter().copied()).0, &expected, "{:?}", frames);
        assert_matches_reference(text.as_bytes(), &cuts)?;
        prop_assert_eq!(read_with_sse_stream(&frames), expected, "{:?}", frames);
    }
}

fn assert_matches_reference(text: &[u8], cuts: &[Index]) -> Result<(), TestCaseError> {
    let events = reference(text);
    let shown = text.escape_ascii().to_string();
    for frames in [vec![text], cut(text, cuts), text.chunks(1).collect()] {
        let (read, boundaries) = read(frames.iter().copied());
        prop_assert_eq!(&read, &events, "{}", shown);
        let mut length = 0;
        for (frame, at_boundary) in frames.iter().zip(boundaries) {
            length += frame.len();
            prop_assert_eq!(
                at_boundary,
                boundary(&text[..length]),
                "{} {}",
                shown,
                length
            );
        }
    }
    Ok(())
}

fn cut<'a>(text: &'a [u8], cuts: &[Index]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = cuts.iter().map(|at| at.index(text.len() + 1)).collect();
    places.sort_unstable();
    let starts = iter::once(0).chain(places.clone());
    let ends = places.iter().copied().chain(iter::once(text.len()));
    starts
        .zip(ends)
        .map(|(start, end)| &text[start..end])
        .collect()
}

/// Reads the events as rmcp's client does.
fn read_with_sse_stream(frames: &[&[u8]]) -> Vec<Seen> {
    let frames: Vec<_> = frames
        .iter()
        .map(|frame| Ok::<_, Infallible>(Bytes::copy_from_slice(frame)))
        .collect();
    let events = SseStream::from_bytes_stream(stream::iter(frames)).try_collect::<Vec<_>>();
    let events = events.now_or_never().unwrap().unwrap();
    let expected = events
        .into_iter()
        .filter(|event| event.id.is_some() || event.retry.is_some() || event.data.is_some());
    expected
        .map(|event| Seen {
            id: event.id.map(String::into_bytes),
            retry: event.retry.map(|retry| retry.min(2_147_483_647)),
            answers: answers(event.data.unwrap_or_default().as_bytes()),
        })
        .collect()
}

// The reference: reads a whole body line by line, as the standard describes it.

fn reference(text: &[u8]) -> Vec<Seen> {
    let mut events = Vec::new();
    let (mut data, mut id, mut retry) = (Vec::new(), None, None);
    for line in lines(text).0 {
        if line.is_empty() {
            if !data.is_empty() || id.is_some() || retry.is_some() {
                data.pop();
                events.push(Seen {
                    id: id.take(),
                    retry: retry.take(),
                    answers: answers(&data),
                });
            }
            data.clear();
            continue;
        }
        let colon = line.iter().position(|byte| *byte == b':');
        let (field, value) = match colon {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &line[..0]),
        };
        let value = if value.starts_with(b" ") {
            &value[1..]
        } else {
            value
        };
        match field {
            b"data" => {
                data.extend_from_slice(value);
                data.push(b'\n');
            }
            b"id" if !value.contains(&b'\0') => id = Some(value.to_vec()),
            b"retry" if !value.is_empty() && value.iter().all(u8::is_ascii_digit) => {
                let number = str::from_utf8(value).unwrap().parse::<u64>();
                retry = Some(number.unwrap_or(u64::MAX).min(2_147_483_647));
            }
            _ => {}
        }
    }
    events
}

/// Returns `true` if no line of an event follows the last blank line.
fn boundary(text: &[u8]) -> bool {
    let (lines, unfinished) = lines(text);
    let since = lines.rsplit(|line| line.is_empty()).next().unwrap();
    unfinished.is_empty() && since.iter().all(|line| line.starts_with(b":"))
}

fn lines(text: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut rest = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    let mut lines = Vec::new();
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        lines.push(&rest[..end]);
        let skip = if rest[end..].starts_with(b"\r\n") {
            2
        } else {
            1
        };
        rest = &rest[end + skip..];
    }
    (lines, rest)
}

// Property inputs.

fn fragment() -> impl Strategy<Value = Vec<u8>> {
    let fragments: Vec<&[u8]> = vec![
        b"\n",
        b"\n",
        b"\n\n",
        b"\r",
        b"\r\n",
        b"\r\n\r\n",
        b":",
        b" ",
        b"data",
        b"data:",
        b"data: ",
        b"id",
        b"id:",
        b"id: ",
        b"retry:",
        b"retry: ",
        b"event: x",
        b"i",
        b"d",
        b"0",
        b"17",
        b"\0",
        b"\xef\xbb\xbf",
        b"\xef",
        b"\xbb",
        b"\xbf",
        b"{",
        b"\"",
        b"null",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":1}",
        b"{\"jsonrpc\":\"2.0\",",
        b"\"id\":1,",
        b"\"result\":1}",
    ];
    select(fragments).prop_map(<[u8]>::to_vec)
}

/// What a server can write between two blank lines.
#[derive(Debug, Clone)]
struct Part {
    data: Option<(String, Answers)>,
    id: Option<String>,
    retry: Option<u64>,
    has_comment: bool,
    has_type: bool,
}

fn part() -> impl Strategy<Value = Part> {
    let fields = (
        option::weighted(0.8, message()),
        option::of("[a-z0-9/: é]{0,8}"),
        option::of(prop_oneof![0_u64..10_000, any::<u64>()]),
        any::<bool>(),
        any::<bool>(),
    );
    fields.prop_map(|(data, id, retry, has_comment, has_type)| Part {
        data,
        id,
        retry,
        has_comment,
        has_type,
    })
}

/// A message on one or more lines, and the request that it answers.
fn message() -> impl Strategy<Value = (String, Answers)> {
    let message = prop_oneof![
        3 => response().prop_map(|(id, response)| (response, Answers::One(id))),
        2 => option::of(any::<i64>()).prop_map(|id| {
            let mut message = json!({ "jsonrpc": "2.0", "method": "m", "params": { "result": 1 } });
            if let Some(id) = id {
                message["id"] = id.into();
            }
            (message, Answers::Nothing)
        }),
        1 => Just((json!({ "jsonrpc": "2.0", "id": null, "error": {} }), Answers::Ambiguous(ParseFailure::BadId))),
    ];
    let text = (message, any::<bool>()).prop_map(|((message, answers), pretty)| {
        let text = if pretty {
            format!("{message:#}")
        } else {
            message.to_string()
        };
        (text, answers)
    });
    prop_oneof![
        6 => text,
        1 => Just((String::new(), Answers::Nothing)),
        1 => Just(("\n".to_owned(), Answers::Nothing)),
        1 => Just(("no json".to_owned(), Answers::Ambiguous(ParseFailure::NotJson))),
    ]
}

fn response() -> impl Strategy<Value = (RequestId, Value)> {
    let id = prop_oneof![
        any::<i64>().prop_map(RequestId::Number),
        "[a-z0-9\"\\\\é\n]{0,6}".prop_map(|id| RequestId::String(id.into())),
    ];
    let result = "[a-zé\"\\\\{}: \r\n]{0,20}";
    (id, any::<bool>(), result).prop_map(|(id, fails, text)| {
        let mut response = json!({ "jsonrpc": "2.0", "id": Value::from(&id) });
        response[if fails { "error" } else { "result" }] = json!({ "id": 1, "method": text });
        (id, response)
    })
}

impl Part {
    fn event(&self) -> Option<Seen> {
        let Self {
            data, id, retry, ..
        } = self;
        if data.is_none() && id.is_none() && retry.is_none() {
            return None;
        }
        Some(Seen {
            id: id.clone().map(String::into_bytes),
            retry: retry.map(|retry| retry.min(2_147_483_647)),
            answers: data
                .clone()
                .map_or(Answers::Nothing, |(_, answers)| answers),
        })
    }
}

/// Writes parts with line endings, field orders and spaces that depend on a seed.
struct Layout(u64);

impl Layout {
    fn write(mut self, parts: &[Part], text: &mut String) {
        for part in parts {
            let mut fields: Vec<(&str, &str)> = Vec::new();
            let retry = part.retry.map(|retry| retry.to_string());
            fields.extend(part.id.as_deref().map(|id| ("id", id)));
            fields.extend(retry.as_deref().map(|retry| ("retry", retry)));
            if part.has_comment {
                fields.push(("", "comment"));
            }
            if part.has_type {
                fields.push(("event", "message"));
            }
            let turn = self.roll(fields.len() as u64 + 1) as usize;
            fields.rotate_left(turn);
            let after = self.roll(fields.len() as u64 + 1) as usize;
            let data = part.data.iter().flat_map(|(data, _)| data.split('\n'));
            fields.splice(after..after, data.map(|line| ("data", line)));
            for (name, value) in fields {
                let space = value.starts_with(' ') || self.roll(3) > 0;
                let ending = self.line_ending();
                text.extend([name, ":", if space { " " } else { "" }, value, ending]);
            }
            // A line feed alone would form a single line ending with the carriage return before it.
            let after_return = text.ends_with('\r');
            text.push_str(if after_return {
                "\r\n"
            } else {
                self.line_ending()
            });
        }
    }

    fn line_ending(&mut self) -> &'static str {
        ["\n", "\n", "\r\n", "\r"][self.roll(4) as usize]
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

// === impl Seen ===

impl From<StreamEvent<'_>> for Seen {
    fn from(event: StreamEvent<'_>) -> Self {
        Self {
            id: event.id.map(<[u8]>::to_vec),
            retry: event.retry.map(|retry| retry.as_millis() as u64),
            answers: event.answers,
        }
    }
}

impl Seen {
    fn id(mut self, id: &str) -> Self {
        self.id = Some(id.as_bytes().to_vec());
        self
    }

    fn retry(mut self, retry: u64) -> Self {
        self.retry = Some(retry);
        self
    }
}

fn with(answers: Answers) -> Seen {
    Seen {
        id: None,
        retry: None,
        answers,
    }
}

fn nothing() -> Seen {
    with(Answers::Nothing)
}

fn id(id: &str) -> Seen {
    nothing().id(id)
}

fn answer_to(id: i64) -> Seen {
    with(Answers::One(RequestId::Number(id)))
}

fn assert_events(text: &str, expected: &[Seen]) {
    assert_bytes(text.as_bytes(), expected);
}

/// Checks a body's events and boundaries, regardless of how it is split into frames.
///
/// The body is read in one frame, in one-byte frames, and cut at any one or two places. Two equal places, or a place at either
/// end, yield an empty frame.
#[track_caller]
fn assert_bytes(text: &[u8], expected: &[Seen]) {
    let check = |frames: &[&[u8]]| {
        let (events, boundaries) = read(frames.iter().copied());
        let shown = || {
            frames
                .iter()
                .map(|frame| frame.escape_ascii().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(events, expected, "{:?}", shown());
        let mut length = 0;
        for (frame, at_boundary) in frames.iter().zip(boundaries) {
            length += frame.len();
            assert_eq!(
                at_boundary,
                boundary(&text[..length]),
                "{:?} {length}",
                shown()
            );
        }
    };
    check(&[text]);
    check(&text.chunks(1).collect::<Vec<_>>());
    for second in 0..=text.len() {
        let (rest, last) = text.split_at(second);
        for first in 0..=rest.len() {
            let (start, middle) = rest.split_at(first);
            check(&[start, middle, last]);
        }
    }
    assert_eq!(reference(text), expected);
}

/// Returns a body's events, and whether it was at a boundary after each frame.
fn read<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Seen>, Vec<bool>) {
    let mut reader = Reader::default();
    let mut boundary = Boundary::default();
    let mut events = Vec::new();
    let boundaries = frames.into_iter().map(|frame| {
        reader.read(frame, |event| events.push(event.into()));
        boundary.observe(frame);
        boundary.is_at_event_boundary()
    });
    let boundaries = boundaries.collect();
    (events, boundaries)
}
