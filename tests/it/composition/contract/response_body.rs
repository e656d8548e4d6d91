//! The response body's contract: what is passed on, and how the call ends.

use std::panic::{AssertUnwindSafe, catch_unwind};

use http::{Method, StatusCode};
use mcp_cancel_on_disconnect::{
    CancelReason::{self, ClientDisconnected, ResponseDropped, ServicePanicked},
    Outcome,
};

use super::{
    exchange::{
        Kind, RecordsTokenOnDrop, TokenAtDrop, assert_cancelled, bodyless, event_stream, exchange,
        immediate, respond,
    },
    script::{
        End, Length,
        Reading::{self, Nothing, OneFrame, ToEnd},
        Script, Seen, Step, read, trailers,
    },
};
use crate::log::number;

/// The reason with which the token fires, if it does.
type TokenReason = Option<CancelReason>;

const NOT_FIRED: TokenReason = None;
const DISCONNECTED: TokenReason = Some(ClientDisconnected);
const RESPONSE_DROPPED: TokenReason = Some(ResponseDropped);

struct Row {
    what: &'static str,
    script: Script,
    /// The reasons if the body is read in full, for one frame, or not at all.
    reasons: [TokenReason; 3],
}

fn row(what: &'static str, script: Script, reasons: [TokenReason; 3]) -> Row {
    Row {
        what,
        script,
        reasons,
    }
}

#[rustfmt::skip]
fn table() -> Vec<Row> {
    let data = || Step::data("data: 1\n\n");
    vec![
        row("one frame", Script::new([data()]), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("one frame, announced as the last", Script::new([data()]).end(End::Announced), [NOT_FIRED, NOT_FIRED, DISCONNECTED]),
        row("one frame between bounds", Script::new([data()]).length(Length::Bounds), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("data and trailers", Script::new([data(), Step::Trailers]), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("data and trailers, announced as the last", Script::new([data(), Step::Trailers]).end(End::Announced), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("trailers alone", Script::new([Step::Trailers]).end(End::Announced), [NOT_FIRED, NOT_FIRED, DISCONNECTED]),
        row("data and an error", Script::new([data(), Step::Error]), [RESPONSE_DROPPED, DISCONNECTED, DISCONNECTED]),
        row("an error at once", Script::new([Step::Error]), [RESPONSE_DROPPED, RESPONSE_DROPPED, DISCONNECTED]),
        row("an error of a known length", Script::new([data(), Step::Error, data()]).length(Length::Exact), [RESPONSE_DROPPED, DISCONNECTED, DISCONNECTED]),
        row("empty", Script::new([]), [NOT_FIRED, NOT_FIRED, DISCONNECTED]),
        row("empty, announced at once", Script::new([]).end(End::Announced), [NOT_FIRED; 3]),
        row("empty, of length zero", Script::stalled().length(Length::Exact), [NOT_FIRED; 3]),
        row("a known length, never asked again", Script::whole("answer").length(Length::Exact).end(End::Silent), [NOT_FIRED, NOT_FIRED, DISCONNECTED]),
        row("a known length in pieces", Script::new([data(), Step::Wait, data()]).length(Length::Exact).end(End::Silent), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("a known length and trailers", Script::new([data(), Step::Trailers]).length(Length::Exact), [NOT_FIRED, NOT_FIRED, DISCONNECTED]),
        row("an empty frame before the data", Script::new([Step::data(""), data()]).length(Length::Exact), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("many frames", Script::new((0..1_000).map(|_| data())), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("frames that have to be waited for", Script::new([Step::Wait, data(), Step::Wait, data(), Step::Wait]), [NOT_FIRED, DISCONNECTED, DISCONNECTED]),
        row("a stream that continues", Script::new([data()]).end(End::Silent), [DISCONNECTED; 3]),
    ]
}

/// Reads each body in the table this far and drops it.
///
/// Then checks the token, the events and the registry.
fn check(reading: Reading) {
    let column = [ToEnd, OneFrame, Nothing]
        .iter()
        .position(|column| *column == reading)
        .expect("a column");
    for row in table() {
        for kind in Kind::ALL {
            let cell = format!("{}, {reading:?}, {kind:?}", row.what);
            let expected = row.reasons[column];
            let (layer, log) = immediate();
            let (response, token) = exchange(&layer, kind.request(), &row.script);
            let mut body = response.into_body();
            assert_eq!(token.reason(), None, "too early: {cell}");
            assert_eq!(log.started(), usize::from(kind.is_call()), "{cell}");
            read(&mut body, reading);
            drop(body);
            assert_eq!(token.reason(), expected, "{cell}");
            assert!(layer.calls().is_empty(), "{cell}");
            if kind.is_call() {
                let outcome = expected.map_or(Outcome::Unknown, Outcome::Cancelled);
                assert_eq!(log.ends(&number(7)), [outcome], "{cell}");
            }
        }
    }
}

#[test]
fn a_body_read_to_its_end_is_not_a_disconnect_and_an_error_is_one() {
    check(ToEnd);
}

#[test]
fn a_body_dropped_after_a_frame_is_a_disconnect_unless_that_was_all_of_it() {
    check(OneFrame);
}

#[test]
fn a_body_that_is_never_polled_is_a_disconnect_unless_it_is_known_to_be_empty() {
    check(Nothing);
}

#[test]
fn frames_trailers_errors_and_known_lengths_are_the_same_as_without_the_layer() {
    for row in table() {
        for reading in [ToEnd, OneFrame, Nothing] {
            for kind in Kind::ALL {
                let mut bare = read(&mut row.script.body(), reading);
                bare.iter_mut().for_each(Seen::remove_bounds);
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
        .flat_map(|row| read(&mut row.script.body(), ToEnd))
        .collect();
    for wanted in [
        Seen::Trailers(trailers()),
        Seen::Error(super::script::Broken),
        Seen::End,
        Seen::Pending,
        Seen::SizeHints(9, Some(9), false),
        Seen::SizeHints(9, Some(109), false),
        Seen::SizeHints(0, None, true),
    ] {
        assert!(seen.contains(&wanted), "{wanted:?}");
    }
}

#[test]
fn polling_a_body_after_its_end_or_its_error_changes_nothing() {
    let script = Script::new([Step::Error, Step::data("late")]);
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, kind.request(), &script);
        let mut body = response.into_body();
        for _ in 0..3 {
            read(&mut body, ToEnd);
            assert_eq!(token.reason(), RESPONSE_DROPPED, "{kind:?}");
        }
        drop(body);
        assert_eq!(
            log.ends(&number(7)).len(),
            usize::from(kind.is_call()),
            "{kind:?}"
        );
    }
}

/// Returns the reason if a response's body is dropped without having been polled.
///
/// hyper does this if the body is not sent.
fn token_reason(method: Method, status: StatusCode) -> TokenReason {
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
fn a_response_that_has_no_body_to_send_is_not_a_disconnect() {
    assert_eq!(token_reason(Method::HEAD, StatusCode::OK), NOT_FIRED);
    assert_eq!(token_reason(Method::GET, StatusCode::NO_CONTENT), NOT_FIRED);
    assert_eq!(
        token_reason(Method::POST, StatusCode::NOT_MODIFIED),
        NOT_FIRED
    );
    assert_eq!(
        token_reason(Method::GET, StatusCode::SWITCHING_PROTOCOLS),
        NOT_FIRED
    );
}

#[test]
fn the_same_response_with_a_body_to_send_is_a_disconnect() {
    assert_eq!(token_reason(Method::GET, StatusCode::OK), DISCONNECTED);
    assert_eq!(
        token_reason(Method::POST, StatusCode::NOT_FOUND),
        DISCONNECTED
    );
    assert_eq!(
        token_reason(Method::OPTIONS, StatusCode::INTERNAL_SERVER_ERROR),
        DISCONNECTED
    );
}

#[test]
fn a_panic_in_the_body_fires_the_token_before_the_body_is_dropped() {
    let script = Script::new([Step::data("data: 1\n\n"), Step::Panic]);
    for kind in Kind::ALL {
        let (layer, log) = immediate();
        let (response, token) = exchange(&layer, kind.request(), &script);
        let mut body = response.into_body();
        let panicked = catch_unwind(AssertUnwindSafe(|| read(&mut body, ToEnd)));
        assert!(panicked.is_err(), "the panic propagates");
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        drop(body);
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        assert_cancelled(&log, kind, ServicePanicked);
    }
}

#[test]
fn the_token_has_fired_when_the_destructor_of_the_body_runs() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let at_drop = TokenAtDrop::default();
        let recorded = at_drop.clone();
        let (response, _token) = respond(&layer, kind.request(), move |tokens| {
            let on_drop = RecordsTokenOnDrop::new(tokens.latest(), &recorded);
            event_stream(Script::stalled().body().on_drop(move || drop(on_drop)))
        });
        assert_eq!(at_drop.reason_at_drop(), None, "the body is still alive");
        drop(response);
        assert_eq!(at_drop.reason_at_drop(), Some(DISCONNECTED), "{kind:?}");
    }
}
