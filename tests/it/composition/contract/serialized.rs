//! Calls as data, with the `serde` feature.

use std::time::Duration;

use http::HeaderValue;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, Grace, Outcome, RequestId,
    observe::{CallState, DetachCause},
};
use serde_json::{Value, json};

use super::{
    exchange::{Kind, exchange},
    script::Script,
};

fn data(of: impl serde::Serialize) -> Value {
    serde_json::to_value(of).expect("data")
}

#[test]
fn a_snapshot_shows_its_call_and_never_the_session_id() {
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::After(Duration::from_secs(60)))
        .call_timeout(Duration::from_secs(600));
    let mut request = Kind::Session.request();
    let secret = HeaderValue::from_static("the-secret-session");
    request.headers_mut().insert("mcp-session-id", secret);
    let (response, _token) = exchange(&layer, request, &Script::stalled());
    let calls = layer.calls();

    let call = &calls.snapshot()[0];
    let attached = data(call);
    let expected = json!({
        "info": {
            "id": u64::from(call.id()),
            "request_id": 7,
            "method": "tools/call",
            "tool": "hold",
            "protocol_version": null,
        },
        "age": call.age().as_secs_f64(),
        "state": "attached",
        "time_left": call.time_left().expect("a limit").as_secs_f64(),
    });
    assert_eq!(attached, expected);

    drop(response);
    let call = &calls.snapshot()[0];
    let detached = data(call);
    let CallState::Detached {
        since, grace_left, ..
    } = call.state()
    else {
        panic!("its client has disconnected: {call:?}");
    };
    let times = json!({
        "since": since.as_secs_f64(),
        "grace_left": grace_left.expect("a grace").as_secs_f64(),
    });
    assert_eq!(detached["state"], json!({ "detached": times }));
    for shown in [attached, detached] {
        assert!(!shown.to_string().contains("secret"), "{shown}");
    }
}

#[test]
fn ids_are_as_in_json_rpc_and_names_as_in_metrics() {
    assert_eq!(data(RequestId::Number(-7)), json!(-7));
    assert_eq!(data(RequestId::String("7".into())), json!("7"));
    assert_eq!(data(CancelReason::TimedOut), json!("timed_out"));
    assert_eq!(data(DetachCause::PeerClosed), json!("peer_closed"));
    assert_eq!(data(Outcome::ClientCancelled), json!("client_cancelled"));
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(data(orphaned), json!({ "cancelled": "orphaned" }));
}
