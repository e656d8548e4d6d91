//! The manual's table of what a disconnect means matches [`Grace::decide`].

use std::time::Duration;

use super::{cells, numbers::ByRetry, tables};
use crate::{
    call::{CallInfo, LISTEN, RequestId},
    disconnect::{DisconnectAction, StreamEnd},
    policy::Grace,
};

const PAGE: &str = include_str!("../disconnect.md");

/// The name of a row, and the calls to which it applies.
type Row = (&'static str, fn(&CallInfo, StreamEnd) -> bool);

/// The rows of the table in their order. The first row that matches decides.
const ROWS: [Row; 8] = [
    (
        "a request with `params.task` (2025-11-25), layer alone",
        |call, _| call.is_task(),
    ),
    ("`subscriptions/listen`", |call, _| call.method() == LISTEN),
    (
        "the server ended its stream, and no client can resume it",
        |call, stream_end| {
            stream_end.by_server && (call.is_cancelled_on_disconnect() || !stream_end.replayable)
        },
    ),
    ("protocol revision 2026-07-28 or later", |call, _| {
        call.is_cancelled_on_disconnect()
    }),
    ("its stream had no event with an id yet", |_, stream_end| {
        !stream_end.replayable
    }),
    ("no session, but event ids", |call, _| {
        call.session().is_none()
    }),
    (
        "in a session whose session manager has an event store",
        |_, stream_end| stream_end.stored,
    ),
    ("in a session, with event ids", |_, _| true),
];

/// Returns every combination of the properties that may matter.
fn cases() -> impl Iterator<Item = (CallInfo, StreamEnd)> {
    let retries = [None, Some(0), Some(3), Some(10), Some(600)];
    (0..1 << 7).flat_map(move |bits: u32| {
        let is = move |bit: u32| bits & (1 << bit) != 0;
        retries.map(move |retry| {
            let method = if is(0) { LISTEN } else { "tools/call" };
            let mut call = CallInfo::new(RequestId::Number(1), method);
            call.set_task(is(1));
            call.set_cancelled_on_disconnect(is(2));
            call.set_session(is(3).then(|| "s".into()));
            let stream_end = StreamEnd {
                replayable: is(4),
                retry: retry.map(Duration::from_secs),
                by_server: is(5),
                stored: is(6),
            };
            (call, stream_end)
        })
    })
}

/// Returns the action that a cell describes.
fn action(cell: &str, stream_end: StreamEnd) -> DisconnectAction {
    match cell {
        "lets it keep running" => DisconnectAction::KeepRunning,
        "cancels it now" => DisconnectAction::CancelNow,
        other => {
            let grace = other.strip_prefix("waits ");
            let grace = grace.and_then(|grace| grace.strip_suffix(", then cancels it"));
            let grace = grace.and_then(ByRetry::of_page);
            let grace = grace.unwrap_or_else(|| panic!("no action: {other}"));
            DisconnectAction::CancelAfter(grace.at(stream_end.retry.unwrap_or_default()))
        }
    }
}

#[test]
fn the_table_of_what_a_disconnect_means_matches_the_code() {
    let head = ["the call", "what the layer does", "because"];
    let mut tables = tables(PAGE).into_iter();
    let table = tables.find(|table| cells(table[0]) == head);
    let table = table.expect("the table");
    let rows: Vec<_> = table[2..].iter().map(|row| cells(row)).collect();
    let names: Vec<_> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(names, ROWS.map(|(name, _)| name));

    let mut decided = [0; ROWS.len()];
    for (call, stream_end) in cases() {
        let row = ROWS.iter().position(|(_, fits)| fits(&call, stream_end));
        let row = row.expect("the last fits all");
        let expected = action(rows[row][1], stream_end);
        let found = Grace::Auto.decide(&call, stream_end);
        assert_eq!(found, expected, "{:?}: {call:?} {stream_end:?}", rows[row]);
        decided[row] += 1;
    }
    assert!(decided.iter().all(|cases| *cases > 0), "{decided:?}");
}
