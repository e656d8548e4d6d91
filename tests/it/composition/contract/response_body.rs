//! The body contract: what passes, and how the call ends.

use std::panic::{AssertUnwindSafe, catch_unwind};

use http::{Method, StatusCode};
use mcp_cancel_on_disconnect::{
    CancelReason::{self, ClientDisconnected, ResponseDropped, ServicePanicked},
    Outcome,
};

use super::{
    exchange::{Dying, Kind, LastWords, bodyless, event_stream, exchange, immediate, respond},
    script::{
        End, Length,
        Reading::{self, NotAtAll, OneFrame, ToItsEnd},
        Script, Seen, Step, read, trailers,
    },
};
use crate::log::number;

/// The reason with which the token fires, if it does.
type Fate = Option<CancelReason>;

const PASSES: Fate = None;
const GONE: Fate = Some(ClientDisconnected);
const BROKE: Fate = Some(ResponseDropped);

struct Row {
    what: &'static str,
    script: Script,
    /// The fates if the body is read to its end, for one frame, or not at all.
    fates: [Fate; 3],
}

fn row(what: &'static str, script: Script, fates: [Fate; 3]) -> Row {
    Row {
        what,
        script,
        fates,
    }
}

#[rustfmt::skip]
fn table() -> Vec<Row> {
    let data = || Step::data("data: 1\n\n");
    vec![
        row("one frame", Script::new([data()]), [PASSES, GONE, GONE]),
        row("one frame, announced as the last", Script::new([data()]).end(End::Said), [PASSES, PASSES, GONE]),
        row("one frame between bounds", Script::new([data()]).length(Length::Bounds), [PASSES, GONE, GONE]),
        row("data and trailers", Script::new([data(), Step::Trailers]), [PASSES, GONE, GONE]),
        row("data and trailers, announced as the last", Script::new([data(), Step::Trailers]).end(End::Said), [PASSES, GONE, GONE]),
        row("trailers alone", Script::new([Step::Trailers]).end(End::Said), [PASSES, PASSES, GONE]),
        row("data and an error", Script::new([data(), Step::Error]), [BROKE, GONE, GONE]),
        row("an error at once", Script::new([Step::Error]), [BROKE, BROKE, GONE]),
        row("an error of a known length", Script::new([data(), Step::Error, data()]).length(Length::Exact), [BROKE, GONE, GONE]),
        row("empty", Script::new([]), [PASSES, PASSES, GONE]),
        row("empty, announced at once", Script::new([]).end(End::Said), [PASSES; 3]),
        row("empty, of length zero", Script::stalled().length(Length::Exact), [PASSES; 3]),
        row("a known length, never asked again", Script::whole("answer").length(Length::Exact).end(End::Silent), [PASSES, PASSES, GONE]),
        row("a known length in pieces", Script::new([data(), Step::Wait, data()]).length(Length::Exact).end(End::Silent), [PASSES, GONE, GONE]),
        row("a known length and trailers", Script::new([data(), Step::Trailers]).length(Length::Exact), [PASSES, PASSES, GONE]),
        row("an empty frame before the data", Script::new([Step::data(""), data()]).length(Length::Exact), [PASSES, GONE, GONE]),
        row("many frames", Script::new((0..1_000).map(|_| data())), [PASSES, GONE, GONE]),
        row("frames that have to be waited for", Script::new([Step::Wait, data(), Step::Wait, data(), Step::Wait]), [PASSES, GONE, GONE]),
        row("a stream that continues", Script::new([data()]).end(End::Silent), [GONE; 3]),
    ]
}

/// Reads each body of the table this far and drops it. Then checks the token, the events and the registry.
fn check(reading: Reading) {
    let column = [ToItsEnd, OneFrame, NotAtAll]
        .iter()
        .position(|column| *column == reading)
        .expect("a column");
    for row in table() {
        for kind in Kind::ALL {
            let cell = format!("{}, {reading:?}, {kind:?}", row.what);
            let fate = row.fates[column];
            let (layer, log) = immediate();
            let (response, token) = exchange(&layer, kind.request(), &row.script);
            let mut body = response.into_body();
            assert_eq!(token.reason(), None, "before its time: {cell}");
            assert_eq!(log.started(), usize::from(kind.is_call()), "{cell}");
            read(&mut body, reading);
            drop(body);
            assert_eq!(token.reason(), fate, "{cell}");
            assert!(layer.calls().is_empty(), "{cell}");
            if kind.is_call() {
                let outcome = fate.map_or(Outcome::Unknown, Outcome::Cancelled);
                assert_eq!(log.ends(&number(7)), [outcome], "{cell}");
            }
        }
    }
}

#[test]
fn a_body_read_to_its_end_is_no_disconnect_and_an_error_is_one() {
    check(ToItsEnd);
}

#[test]
fn a_body_dropped_after_a_frame_is_a_disconnect_unless_that_was_all_of_it() {
    check(OneFrame);
}

#[test]
fn a_body_that_is_never_polled_is_a_disconnect_unless_it_is_known_to_be_empty() {
    check(NotAtAll);
}

#[test]
fn frames_trailers_errors_and_known_lengths_are_those_of_the_body_without_the_layer() {
    for row in table() {
        for reading in [ToItsEnd, OneFrame, NotAtAll] {
            for kind in Kind::ALL {
                let mut bare = read(&mut row.script.body(), reading);
                bare.iter_mut().for_each(Seen::promise_no_length);
                let (layer, _log) = immediate();
                let (response, _token) = exchange(&layer, kind.request(), &row.script);
                let layered = read(&mut response.into_body(), reading);
                assert_eq!(layered, bare, "{}, {reading:?}, {kind:?}", row.what);
            }
        }
    }
}

#[test]
fn the_table_has_trailers_errors_and_ends_that_the_reader_sees() {
    let seen: Vec<Seen> = table()
        .iter()
        .flat_map(|row| read(&mut row.script.body(), ToItsEnd))
        .collect();
    for wanted in [
        Seen::Trailers(trailers()),
        Seen::Error(super::script::Broken),
        Seen::End,
        Seen::Pending,
        Seen::Look(9, Some(9), false),
        Seen::Look(9, Some(109), false),
        Seen::Look(0, None, true),
    ] {
        assert!(seen.contains(&wanted), "{wanted:?}");
    }
}

#[test]
fn a_body_that_is_polled_on_after_its_end_or_its_error_changes_nothing() {
    let script = Script::new([Step::Error, Step::data("late")]);
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, kind.request(), &script);
        let mut body = response.into_body();
        for _ in 0..3 {
            read(&mut body, ToItsEnd);
            assert_eq!(token.reason(), BROKE, "{kind:?}");
        }
        drop(body);
        assert_eq!(
            log.ends(&number(7)).len(),
            usize::from(kind.is_call()),
            "{kind:?}"
        );
    }
}

/// Returns the fate of an exchange whose body is dropped unpolled, as by hyper for a body that is not sent.
fn fate_of(method: Method, status: StatusCode) -> Fate {
    let (layer, _log) = immediate();
    let (response, token) = respond(&layer, bodyless(method), move |_| {
        let mut response = event_stream(Script::whole("a body").body());
        *response.status_mut() = status;
        response
    });
    drop(response);
    token.reason()
}

#[test]
fn a_response_that_has_no_body_to_send_is_no_disconnect() {
    assert_eq!(fate_of(Method::HEAD, StatusCode::OK), PASSES);
    assert_eq!(fate_of(Method::GET, StatusCode::NO_CONTENT), PASSES);
    assert_eq!(fate_of(Method::POST, StatusCode::NOT_MODIFIED), PASSES);
    assert_eq!(
        fate_of(Method::GET, StatusCode::SWITCHING_PROTOCOLS),
        PASSES
    );
}

#[test]
fn the_same_response_with_a_body_to_send_is_a_disconnect() {
    assert_eq!(fate_of(Method::GET, StatusCode::OK), GONE);
    assert_eq!(fate_of(Method::POST, StatusCode::NOT_FOUND), GONE);
    assert_eq!(
        fate_of(Method::OPTIONS, StatusCode::INTERNAL_SERVER_ERROR),
        GONE
    );
}

#[test]
fn a_panic_in_the_body_fires_the_token_before_the_body_is_dropped() {
    let script = Script::new([Step::data("data: 1\n\n"), Step::Panic]);
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, kind.request(), &script);
        let mut body = response.into_body();
        let panicked = catch_unwind(AssertUnwindSafe(|| read(&mut body, ToItsEnd)));
        assert!(panicked.is_err(), "the panic passes");
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        drop(body);
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        if kind.is_call() {
            let end = [Outcome::Cancelled(ServicePanicked)];
            assert_eq!(log.ends(&number(7)), end, "{kind:?}");
        }
    }
}

#[test]
fn the_token_has_fired_when_the_destructor_of_the_body_runs() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let words = LastWords::default();
        let last_words = words.clone();
        let (response, _token) = respond(&layer, kind.request(), move |tokens| {
            let dying = Dying::new(tokens.latest(), &last_words);
            event_stream(Script::stalled().body().on_drop(move || drop(dying)))
        });
        assert_eq!(words.said(), None, "the body exists");
        drop(response);
        assert_eq!(words.said(), Some(GONE), "{kind:?}");
    }
}
