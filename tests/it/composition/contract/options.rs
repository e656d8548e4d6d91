//! A layer's options in combination, in any order and on clones.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use mcp_cancel_on_disconnect::{CallInfo, CancelOnDisconnectLayer, Event, Grace, Policy};

use super::{
    exchange::{Kind, exchange},
    script::Script,
};

const GRACE: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a layer's options amount to for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Effect {
    /// How long the call waits for its client, or `None` if it keeps running.
    grace: Option<Duration>,
    has_timeout: bool,
}

/// Returns how the options affect a call whose client disconnects.
fn effect_of(layer: CancelOnDisconnectLayer) -> Effect {
    let grace = Arc::new(Mutex::new(None));
    let seen = grace.clone();
    let layer = layer.observe(move |event: &Event<'_>| {
        if let Event::Detached { grace, .. } = event {
            *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(*grace);
        }
    });
    let (response, _token) = exchange(&layer, Kind::Session.request(), &Script::stalled());
    let calls = layer.calls().snapshot();
    let [call] = &calls[..] else {
        panic!("one call: {calls:?}");
    };
    let time_left = call.time_left();
    assert!(
        time_left.is_none_or(|left| left <= TIMEOUT),
        "{time_left:?}"
    );
    drop(response);
    let grace = *grace.lock().unwrap_or_else(PoisonError::into_inner);
    Effect {
        grace: grace.expect("the call has been detached"),
        has_timeout: time_left.is_some(),
    }
}

fn layer() -> CancelOnDisconnectLayer {
    CancelOnDisconnectLayer::new()
}

/// Applies two options in both orders, as well as with a clone in between.
fn in_any_order(
    first: impl Fn(CancelOnDisconnectLayer) -> CancelOnDisconnectLayer,
    second: impl Fn(CancelOnDisconnectLayer) -> CancelOnDisconnectLayer,
) -> [CancelOnDisconnectLayer; 4] {
    let (one, other) = (first(layer()), second(layer()));
    [
        second(one.clone()),
        first(other.clone()),
        second(first(layer())),
        first(second(layer())).clone(),
    ]
}

#[test]
fn a_policy_that_sets_nothing_keeps_the_options_of_the_layer() {
    let whole = |layer: CancelOnDisconnectLayer| {
        let layer = layer.grace(Grace::After(GRACE));
        layer.call_timeout(TIMEOUT)
    };
    for layer in in_any_order(whole, |layer| layer.policy(|_| Policy::new())) {
        let effect = effect_of(layer);
        assert_eq!(effect.grace, Some(GRACE));
        assert!(effect.has_timeout);
    }
}

#[test]
fn a_policy_replaces_only_what_it_sets() {
    let grace = |layer: CancelOnDisconnectLayer| layer.grace(Grace::After(GRACE));
    let timeout = |layer: CancelOnDisconnectLayer| layer.call_timeout(TIMEOUT);
    let timeout_of_policy =
        |layer: CancelOnDisconnectLayer| layer.policy(|_| Policy::new().call_timeout(TIMEOUT));
    let grace_of_policy =
        |layer: CancelOnDisconnectLayer| layer.policy(|_| Policy::new().grace(Grace::After(GRACE)));
    let both = Effect {
        grace: Some(GRACE),
        has_timeout: true,
    };
    for layer in in_any_order(grace, timeout_of_policy) {
        assert_eq!(effect_of(layer), both);
    }
    for layer in in_any_order(timeout, grace_of_policy) {
        assert_eq!(effect_of(layer), both);
    }
}

#[test]
fn a_policy_overrides_the_layer() {
    let never = |layer: CancelOnDisconnectLayer| layer.grace(Grace::Never).call_timeout(TIMEOUT);
    let of_policy = |layer: CancelOnDisconnectLayer| {
        layer.policy(|_| {
            let policy = Policy::new().grace(Grace::After(GRACE));
            policy.call_timeout(Duration::MAX)
        })
    };
    for layer in in_any_order(never, of_policy) {
        let effect = Effect {
            grace: Some(GRACE),
            has_timeout: false,
        };
        assert_eq!(effect_of(layer), effect);
    }
    // There is no event from which a client could resume, so `Auto` does not wait.
    let auto = |_: &CallInfo| Policy::new().grace(Grace::Auto);
    let effect = effect_of(layer().grace(Grace::Never).policy(auto));
    assert_eq!(effect.grace, Some(Duration::ZERO));
}

#[test]
fn a_policy_that_panics_keeps_the_options_of_the_layer() {
    let broken = |_: &CallInfo| -> Policy { panic!("a policy panics on purpose") };
    let whole = |layer: CancelOnDisconnectLayer| {
        let layer = layer.grace(Grace::After(GRACE));
        layer.call_timeout(TIMEOUT)
    };
    for layer in in_any_order(whole, |layer| layer.policy(broken)) {
        let effect = Effect {
            grace: Some(GRACE),
            has_timeout: true,
        };
        assert_eq!(effect_of(layer), effect);
    }
}

fn is_hold(call: &CallInfo) -> bool {
    call.tool() == Some("hold")
}

fn is_other(call: &CallInfo) -> bool {
    !is_hold(call)
}

fn is_broken(_: &CallInfo) -> bool {
    panic!("an exemption panics on purpose")
}

#[test]
fn a_call_is_exempt_if_any_of_several_closures_returns_true() {
    let hold = |layer: CancelOnDisconnectLayer| layer.exempt(is_hold);
    for layer in in_any_order(hold, |layer| layer.exempt(is_other)) {
        assert_eq!(effect_of(layer).grace, None);
    }
    for layer in in_any_order(hold, |layer| layer.exempt(is_broken)) {
        assert_eq!(effect_of(layer).grace, None, "the other closure decided");
    }
    let none = layer().exempt(is_other).exempt(is_broken).exempt(is_other);
    let effect = effect_of(none.grace(Grace::After(GRACE)));
    assert_eq!(effect.grace, Some(GRACE));
}

#[test]
fn an_exempt_call_has_no_grace_and_keeps_its_timeout() {
    let policy = |layer: CancelOnDisconnectLayer| {
        layer.policy(|_| {
            let policy = Policy::new().grace(Grace::Immediate);
            policy.call_timeout(TIMEOUT)
        })
    };
    for layer in in_any_order(policy, |layer| layer.exempt(is_hold)) {
        let effect = Effect {
            grace: None,
            has_timeout: true,
        };
        assert_eq!(effect_of(layer), effect);
    }
}
