//! The numbers of the defaults page match those of the code.

use std::{collections::BTreeSet, time::Duration};

use super::{
    cells, constants,
    numbers::{ByRetry, Number},
    read, root, tables,
};
use crate::{
    Grace, Limits, MIN_GRACE, RequestId,
    call::CallInfo,
    disconnect::{DisconnectAction, StreamEnd},
    observe::Limit,
};

const PAGE: &str = include_str!("../defaults.md");

const GRACE: &str = "grace period of a call that its client can resume";
const LONGEST_RETRY: &str = "longest `retry` that counts five times for a grace period";

/// The rows whose value is a private constant, with the constant's file and name.
const CONSTANTS: [(&str, &str, &str); 12] = [
    (
        "time for the network that a grace period leaves after `retry`",
        "src/disconnect.rs",
        "MAX_DELAY",
    ),
    (
        "time that a cancelled handler has to end on its own",
        "src/mcp/abort/mod.rs",
        "ABORT_GRACE",
    ),
    (
        "interval of probes in a stream whose head was sent early, without `keep_alive`",
        "src/response/future.rs",
        "DEFAULT_PROBE_INTERVAL",
    ),
    (
        "time by which a pending resume extends the grace period of its call",
        "src/registry/core/call_timers.rs",
        "MAX_RESUME_WAIT",
    ),
    (
        "resumes in a row without an event that renew the grace period (layer alone)",
        "src/registry/core/call_timers.rs",
        "MAX_EMPTY_RESUMES",
    ),
    (
        "minimum time the outcome of an ended call is retained",
        "src/exchange/end.rs",
        "MIN_RETENTION",
    ),
    (
        "retained answers of one session whose client was connected",
        "src/registry/core/retention.rs",
        "MAX_DELIVERED",
    ),
    (
        "maximum time until a session accepts a cancellation",
        "src/exchange/inject.rs",
        "INJECTION_TIMEOUT",
    ),
    (
        "time that the decision of `confirm` may take",
        "src/exchange/confirm.rs",
        "CONFIRM_TIMEOUT",
    ),
    (
        "time after which a detached call without a deadline is forgotten (layer alone)",
        "src/registry/core.rs",
        "UNOBSERVED_TTL",
    ),
    (
        "maximum time until the next event of the resumed stream of a cancelled call (layer alone)",
        "src/response/late.rs",
        "NEXT_EVENT_TIMEOUT",
    ),
    (
        "largest request body that is parsed (layer alone)",
        "src/envelope/mod.rs",
        "MAX_BODY",
    ),
];

/// Returns the name and the value of each row, as they are rendered.
fn rows() -> Vec<(&'static str, &'static str)> {
    let tables = tables(PAGE).into_iter();
    let rows = tables.flat_map(|table| table[2..].to_vec());
    rows.map(|row| (cells(row)[0], cells(row)[1])).collect()
}

fn value_on_page(name: &str) -> &'static str {
    let mut rows = rows().into_iter();
    let row = rows.find(|(row, _)| *row == name);
    row.unwrap_or_else(|| panic!("no row {name:?}")).1
}

fn limits() -> [(&'static str, Number); 5] {
    let limits = Limits::default();
    [
        ("calls that are tracked", limits.get(Limit::Calls).into()),
        ("detached calls", limits.get(Limit::Detached).into()),
        (
            "detached calls of one session",
            limits.get(Limit::DetachedPerSession).into(),
        ),
        ("retained answers in all", limits.retained.into()),
        (
            "retained answers of one session",
            limits.retained_per_session.into(),
        ),
    ]
}

/// The rows of optional features. They exist whichever features are enabled.
const OF_FEATURES: [&str; 5] = [
    "time after which an unused session is closed",
    "`DeadPeer`: silence before the first probe",
    "`DeadPeer`: time between two probes",
    "`DeadPeer`: probes that stay unanswered",
    "`DeadPeer`: time that sent data may stay unacknowledged",
];

#[test]
fn every_row_of_the_defaults_page_is_compared_with_the_code() {
    let rows: Vec<_> = rows().into_iter().map(|(name, _)| name).collect();
    let names: BTreeSet<_> = rows.iter().copied().collect();
    assert_eq!(names.len(), rows.len(), "a row occurs twice: {rows:#?}");
    let compared = CONSTANTS.map(|(name, ..)| name).into_iter();
    let compared = compared.chain(limits().map(|(name, _)| name));
    let compared = compared.chain(OF_FEATURES);
    let compared: BTreeSet<_> = compared.chain([GRACE, LONGEST_RETRY]).collect();
    assert_eq!(names, compared);
}

#[test]
fn the_numbers_of_the_defaults_page_are_those_of_the_code() {
    for (name, expected) in limits() {
        assert_eq!(
            Number::of_page(value_on_page(name)),
            Some(expected),
            "{name}"
        );
    }
    for (name, file, constant) in CONSTANTS {
        let source = read(&root().join(file));
        let value = constants(&source).find(|(name, _)| *name == constant);
        let (_, value) = value.unwrap_or_else(|| panic!("no {constant} in {file}"));
        let value = Number::of_source(value);
        assert!(value.is_some(), "{constant} is no number");
        assert_eq!(Number::of_page(value_on_page(name)), value, "{name}");
    }
}

#[test]
fn the_grace_of_the_defaults_page_is_that_of_the_code() {
    let mut call = CallInfo::new(RequestId::Number(1), "tools/call");
    call.set_session(Some("s".into()));
    let grace = |retry| {
        let stream_end = StreamEnd {
            replayable: true,
            retry: Some(retry),
            by_server: false,
            stored: false,
        };
        match Grace::Auto.decide(&call, stream_end) {
            DisconnectAction::CancelAfter(grace) => grace,
            other => panic!("no grace: {other:?}"),
        }
    };
    let page = ByRetry::of_page(value_on_page(GRACE)).expect("a time");
    assert_eq!(page.at(Duration::ZERO), MIN_GRACE);
    let longest = Number::of_page(value_on_page(LONGEST_RETRY)).and_then(|longest| longest.time());
    let longest = longest.expect("a time");
    for seconds in [0, 3, 10, 599] {
        let retry = Duration::from_secs(seconds);
        assert_eq!(grace(retry), page.at(retry), "{retry:?}");
    }
    assert_eq!(grace(longest), page.at(longest));
    assert_eq!(grace(2 * longest), page.at(longest));
    // A longer `retry` counts once.
    assert_eq!(grace(9 * longest), 9 * longest + Duration::from_secs(5));
}

#[cfg(feature = "rmcp")]
#[test]
fn the_idle_timeout_of_the_defaults_page_is_that_of_rmcp() {
    use rmcp::transport::streamable_http_server::session::local::SessionConfig;

    let timeout = SessionConfig::default().keep_alive.expect("a time");
    assert_eq!(
        Number::of_page(value_on_page(OF_FEATURES[0])),
        Some(timeout.into())
    );
}

#[cfg(feature = "socket")]
#[test]
fn the_socket_options_of_the_defaults_page_are_those_of_a_dead_peer() {
    // `Debug` shows all four.
    let shown = format!("{:?}", crate::socket::DeadPeer::new());
    for (name, field) in OF_FEATURES[1..]
        .iter()
        .zip(["idle", "interval", "probes", "user_timeout"])
    {
        let (_, value) = shown.split_once(&format!("{field}: ")).expect("a field");
        let value = value.split([',', ' ']).next().expect("a value");
        let value_on_page = value_on_page(name).replace(' ', "");
        assert_eq!(value_on_page, value, "{name}");
    }
}
