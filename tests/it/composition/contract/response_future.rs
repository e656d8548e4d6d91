//! The response future if it is dropped, fails or panics.

use std::{
    convert::Infallible,
    future::{Ready, pending, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
};

use mcp_cancel_on_disconnect::{
    CancelReason::{ClientDisconnected, ServicePanicked},
    Event, Outcome,
};
use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

use super::{
    exchange::{
        Answer, InnerRequest, Kind, RecordsTokenOnDrop, TokenAtDrop, Tokens, assert_cancelled,
        event_stream, immediate, poll_once, reading, sent,
    },
    script::{Broken, Script},
};
use crate::log::number;

async fn panicking() -> Answer<Infallible> {
    panic!("the service panics in `poll` on purpose");
}

#[test]
fn a_future_dropped_before_its_head_is_a_disconnect() {
    for kind in Kind::ALL {
        let (layer, log, tokens, mut response) = sent(kind, |_| pending::<Answer<Infallible>>());
        assert!(poll_once(response.as_mut()).is_pending());
        let token = tokens.latest();
        assert_eq!(token.reason(), None, "{kind:?}");
        assert_eq!(layer.calls().len(), usize::from(kind.is_call()), "{kind:?}");
        drop(response);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        assert_cancelled(&log, kind, ClientDisconnected);
    }
}

#[test]
fn a_future_that_is_never_polled_is_a_disconnect() {
    let (layer, _log) = immediate();
    let tokens = Tokens::default();
    let recording = tokens.clone();
    let mut service = layer.layer(service_fn(move |request: InnerRequest| {
        recording.record(&request);
        pending::<Answer<Infallible>>()
    }));
    let response = service.call(Kind::Plain.request());
    drop(response);
    assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
}

#[test]
fn an_error_of_the_inner_service_passes_and_is_not_a_disconnect() {
    for kind in Kind::ALL {
        let (layer, log, tokens, mut response) = sent(kind, |_| ready(Answer::Err(Broken)));
        let Poll::Ready(Err(error)) = poll_once(response.as_mut()) else {
            panic!("the service fails at once");
        };
        assert_eq!(error, Broken, "the error is unchanged");
        drop(response);
        assert_eq!(tokens.latest().reason(), None, "{kind:?}");
        assert!(layer.calls().is_empty(), "{kind:?}");
        if kind.is_call() {
            assert_eq!(log.ends(&number(7)), [Outcome::Failed], "{kind:?}");
        }
    }
}

#[test]
fn a_panic_in_call_fires_the_token() {
    let (layer, _log) = immediate();
    let tokens = Tokens::default();
    let recording = tokens.clone();
    let mut service = layer.layer(service_fn(
        move |request: InnerRequest| -> Ready<Answer<Infallible>> {
            recording.record(&request);
            panic!("the service panics in `call` on purpose");
        },
    ));
    let request = Kind::Plain.request();
    let panicked = catch_unwind(AssertUnwindSafe(|| drop(service.call(request))));
    assert!(panicked.is_err(), "the panic propagates");
    assert_eq!(tokens.latest().reason(), Some(ServicePanicked));
}

#[test]
fn a_panic_in_poll_fires_the_token_also_if_the_future_is_dropped_later() {
    for kind in Kind::ALL {
        let (_layer, log, tokens, mut response) = sent(kind, |_| panicking());
        // As in tokio, the panic is caught around the poll and the future is dropped afterwards.
        let panicked = catch_unwind(AssertUnwindSafe(|| poll_once(response.as_mut()).is_ready()));
        assert!(panicked.is_err(), "the panic propagates");
        let token = tokens.latest();
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        drop(response);
        assert_eq!(token.reason(), Some(ServicePanicked), "{kind:?}");
        assert_cancelled(&log, kind, ServicePanicked);
    }
}

#[test]
fn a_panic_in_an_observer_of_a_panicked_call_is_contained() {
    let (layer, log) = immediate();
    let layer = layer.observe(|_: &Event<'_>| {
        // If a destructor panicked while the other panic is unwinding, the process would abort.
        panic!("the observer panics on purpose");
    });
    let service = layer.layer(reading(&Tokens::default(), |_| panicking()));
    let mut response = Box::pin(service.oneshot(Kind::Stateless.request()));
    let panicked = catch_unwind(AssertUnwindSafe(|| poll_once(response.as_mut()).is_ready()));
    assert!(panicked.is_err(), "the service's panic propagates");
    let end = [Outcome::Cancelled(ServicePanicked)];
    assert_eq!(log.ends(&number(7)), end);
}

#[test]
fn the_token_has_fired_when_the_destructor_of_the_future_runs() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let at_drop = TokenAtDrop::default();
        let recorded = at_drop.clone();
        let service = layer.layer(reading(&Tokens::default(), move |tokens| {
            let on_drop = RecordsTokenOnDrop::new(tokens.latest(), &recorded);
            async move {
                let _dying = on_drop;
                pending::<Answer<Infallible>>().await
            }
        }));
        let mut response = Box::pin(service.oneshot(kind.request()));
        assert!(poll_once(response.as_mut()).is_pending());
        assert_eq!(at_drop.reason_at_drop(), None, "the future is still alive");
        drop(response);
        assert_eq!(
            at_drop.reason_at_drop(),
            Some(Some(ClientDisconnected)),
            "{kind:?}"
        );
    }
}

#[test]
fn after_its_head_the_drop_of_the_future_does_not_end_the_call() {
    for kind in Kind::ALL {
        let (layer, _log) = immediate();
        let tokens = Tokens::default();
        let service = layer.layer(reading(&tokens, |_| {
            ready(Answer::<Infallible>::Ok(event_stream(
                Script::stalled().body(),
            )))
        }));
        let mut future = Box::pin(service.oneshot(kind.request()));
        let Poll::Ready(Ok(response)) = poll_once(future.as_mut()) else {
            panic!("the service answers at once");
        };
        drop(future);
        assert_eq!(tokens.latest().reason(), None, "{kind:?}");
        drop(response);
    }
}
