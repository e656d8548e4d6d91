//! Several layers around one service, and one layer around several services.

use std::{
    convert::Infallible,
    future::{Ready, ready},
};

use futures_util::FutureExt as _;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason::ClientDisconnected, Grace, Outcome,
};
use tower::{Layer as _, ServiceBuilder, ServiceExt as _};

use super::{
    exchange::{Answer, Kind, Tokens, event_stream, exchange, immediate, reading},
    script::{Reading::ToEnd, Script, Step, read},
};
use crate::log::{Happened, Log, number};

fn stalled() -> impl Fn(&Tokens) -> Ready<Answer<Infallible>> + Clone + Send + 'static {
    |_| ready(Ok(event_stream(Script::stalled().body())))
}

#[tokio::test]
async fn the_inner_one_of_two_layers_is_inert() {
    for kind in Kind::ALL {
        let (outer, outer_log) = immediate();
        let (inner, inner_log) = immediate();
        let tokens = Tokens::default();
        let service = ServiceBuilder::new()
            .layer(outer.clone())
            .layer(inner.clone())
            .service(reading(&tokens, stalled()));
        let Ok(response) = service.oneshot(kind.request()).await;
        assert!(inner.calls().is_empty(), "{kind:?}");
        assert_eq!(outer.calls().len(), usize::from(kind.is_call()), "{kind:?}");
        drop(response);
        assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
        assert!(outer.calls().is_empty(), "{kind:?}");
        assert_eq!(inner_log.events(), [], "{kind:?}");
        if kind.is_call() {
            let [Happened::Started(started), Happened::Ended(ended, outcome)] =
                &outer_log.events()[..]
            else {
                panic!("{kind:?}: {:?}", outer_log.events());
            };
            assert_eq!(started, ended, "{kind:?}");
            assert_eq!(*outcome, Outcome::Cancelled(ClientDisconnected), "{kind:?}");
        }
    }
}

#[test]
fn the_outer_one_of_two_layers_sets_the_grace() {
    let patient = || Log::of(CancelOnDisconnectLayer::new().grace(Grace::Never));
    for (outer, inner, reason) in [
        (immediate(), patient(), Some(ClientDisconnected)),
        (patient(), immediate(), None),
    ] {
        let tokens = Tokens::default();
        let service = reading(&tokens, stalled());
        let service = outer.0.layer(inner.0.layer(service));
        let response = service.oneshot(Kind::Session.request()).now_or_never();
        drop(response.expect("the service answers at once"));
        assert_eq!(tokens.latest().reason(), reason);
    }
}

#[test]
fn a_body_passes_through_two_layers_unchanged() {
    let script = Script::new([Step::data("data: 1\n\n"), Step::Wait, Step::Trailers]);
    let (outer, _log) = immediate();
    let (inner, _log) = immediate();
    let answer = script.clone();
    let service = reading(&Tokens::default(), move |_| {
        ready(Answer::<Infallible>::Ok(event_stream(answer.body())))
    });
    let service = outer.layer(inner.layer(service));
    let response = service.oneshot(Kind::Stateless.request()).now_or_never();
    let Ok(response) = response.expect("the service answers at once");
    let seen = read(&mut response.into_body(), ToEnd);
    assert_eq!(seen, read(&mut script.body(), ToEnd));
}

#[test]
fn clones_of_a_layer_and_of_its_services_count_their_calls_together() {
    let (layer, log) = immediate();
    let calls = layer.calls();
    let (first, _) = exchange(&layer, Kind::Stateless.request(), &Script::stalled());
    let clone = layer.clone().grace(Grace::Never);
    let (second, _) = exchange(&clone, Kind::Session.request(), &Script::stalled());
    let service = layer.layer(reading(&Tokens::default(), stalled()));
    let third = service
        .clone()
        .oneshot(Kind::Stateless.request())
        .now_or_never();
    assert_eq!(calls.len(), 3);
    assert_eq!(clone.calls().len(), 3);
    drop((first, second, third));
    // The second call keeps running without its client.
    assert_eq!(calls.len(), 1);
    let cancelled = (number(7), ClientDisconnected);
    assert_eq!(log.cancelled(), [cancelled.clone(), cancelled]);
}

#[test]
fn separate_layers_count_their_calls_separately() {
    let (layer, _log) = immediate();
    let other = CancelOnDisconnectLayer::new();
    let (_response, _token) = exchange(&layer, Kind::Session.request(), &Script::stalled());
    assert_eq!(layer.calls().len(), 1);
    assert!(other.calls().is_empty());
}
