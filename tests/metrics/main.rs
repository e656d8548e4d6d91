//! Checks what is exported to Prometheus, for calls with known outcomes over real sockets.
//!
//! This is a separate binary, because the recorder is global.

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod dashboard;
#[path = "../../examples/prometheus/endpoint.rs"]
#[allow(dead_code, reason = "the rest is for the example")]
mod endpoint;
mod scrape;
mod script;
#[path = "../it/support/setup/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "shared with the other tests, which use all of it"
)]
mod setup;

// `setup` knows the other tests' support by this name.
use test_support as support;

use self::script::{SCRIPT, scripted};

/// The names and values of a sample's labels, in any order.
type Labels<'a> = &'a [(&'a str, &'a str)];

const CALL: (&str, &str) = ("method", "tools/call");
const HOLD: (&str, &str) = ("tool", "hold");

#[tokio::test]
async fn started_calls_have_ended_or_are_in_flight() {
    let scrape = scripted().await;
    let started = scrape.sum("mcp_calls_started_total");
    let ended = scrape.sum("mcp_calls_ended_total");
    let in_flight = scrape.sum("mcp_calls_in_flight");
    assert_eq!(started, ended + in_flight);
    assert_eq!(in_flight, SCRIPT.in_flight);
    assert_eq!(scrape.sum("mcp_calls_detached"), SCRIPT.detached);
}

#[tokio::test]
async fn ends_are_counted_by_outcome_and_reason() {
    let scrape = scripted().await;
    let ended = |more: Labels<'_>| {
        let labels = [&[CALL][..], more, &[HOLD]].concat();
        scrape.value("mcp_calls_ended_total", &labels)
    };
    let cancelled = |reason| ended(&[("outcome", "cancelled"), ("reason", reason)]);
    assert_eq!(ended(&[("outcome", "completed")]), SCRIPT.completed);
    assert_eq!(ended(&[("outcome", "failed")]), SCRIPT.failed);
    assert_eq!(ended(&[("outcome", "unknown")]), SCRIPT.unknown);
    assert_eq!(
        ended(&[("outcome", "client_cancelled")]),
        SCRIPT.client_cancelled
    );
    assert_eq!(cancelled("client_disconnected"), SCRIPT.disconnected);
    assert_eq!(cancelled("orphaned"), SCRIPT.orphaned);
    assert_eq!(cancelled("timed_out"), SCRIPT.timed_out);
    assert_eq!(cancelled("session_closed"), SCRIPT.closed);
}

#[tokio::test]
async fn disconnects_and_resumes_are_counted() {
    let scrape = scripted().await;
    let detaches = |cause| {
        let labels = [("cause", cause), CALL, HOLD];
        scrape.value("mcp_call_detaches_total", &labels)
    };
    assert_eq!(detaches("disconnected"), SCRIPT.disconnects);
    assert_eq!(detaches("ended_by_server"), SCRIPT.ended_by_server);
    let resumes = scrape.value("mcp_call_resumes_total", &[CALL, HOLD]);
    assert_eq!(resumes, SCRIPT.resumed);
}

#[tokio::test]
async fn faults_are_counted() {
    let scrape = scripted().await;
    let failed = scrape.value("mcp_call_cancels_failed_total", &[CALL, HOLD]);
    assert_eq!(failed, SCRIPT.cancels_failed);
    let untracked = scrape.value("mcp_calls_untracked_total", &[("limit", "calls")]);
    assert_eq!(untracked, SCRIPT.untracked);
    let dropped = [("outcome", "cancelled")];
    let dropped = scrape.value("mcp_answers_evicted_total", &dropped);
    assert_eq!(dropped, SCRIPT.dropped);
    let unparsed = scrape.value("mcp_request_bodies_unparsed_total", &[("why", "not_json")]);
    assert_eq!(unparsed, SCRIPT.unparsed);
}

#[tokio::test]
async fn times_are_in_seconds() {
    let scrape = scripted().await;
    let of = |name: &str, suffix: &str, more: Labels<'_>| {
        let labels = [&[CALL][..], more, &[HOLD]].concat();
        scrape.value(&format!("{name}_{suffix}"), &labels)
    };
    let detached = "mcp_call_detached_seconds";
    assert_eq!(
        of(detached, "count", &[("until", "resumed")]),
        SCRIPT.resumed
    );
    assert_eq!(
        of(detached, "sum", &[("until", "resumed")]),
        SCRIPT.resumed_after_s
    );
    let token = "mcp_call_disconnect_to_token_seconds";
    let orphaned = &[("reason", "orphaned")];
    assert_eq!(of(token, "count", orphaned), SCRIPT.orphaned);
    assert_eq!(of(token, "sum", orphaned), SCRIPT.orphaned_after_s);
    let duration = "mcp_call_duration_seconds";
    let completed = &[("outcome", "completed")];
    assert_eq!(of(duration, "count", completed), SCRIPT.completed);
}

#[tokio::test]
async fn every_end_and_every_detach_has_a_duration() {
    let scrape = scripted().await;
    let durations = scrape.sum("mcp_call_duration_seconds_count");
    assert_eq!(durations, scrape.sum("mcp_calls_ended_total"));
    let detached = scrape.sum("mcp_call_detached_seconds_count");
    assert_eq!(
        detached + scrape.sum("mcp_calls_detached"),
        scrape.sum("mcp_call_detaches_total")
    );
}

#[tokio::test]
async fn no_text_of_a_client_becomes_a_label() {
    let scrape = scripted().await;
    assert!(
        !scrape.text().contains(script::UNKNOWN_NAME),
        "{}",
        scrape.text()
    );
    let other = [("method", "other")];
    assert_eq!(
        scrape.value("mcp_calls_started_total", &other),
        SCRIPT.other_methods
    );
    let other = [CALL, ("tool", "other")];
    assert_eq!(
        scrape.value("mcp_calls_started_total", &other),
        SCRIPT.other_tools
    );
}

#[tokio::test]
async fn every_metric_is_described_with_its_kind() {
    let scrape = scripted().await;
    for (name, kind) in scrape.types() {
        assert!(scrape.is_described(&name), "{name}");
        let expected = match name {
            _ if name.ends_with("_total") => "counter",
            _ if name.ends_with("_seconds") => "histogram",
            _ => "gauge",
        };
        assert_eq!(kind, expected, "{name}");
    }
    assert_eq!(scrape.types().len(), 13);
}
