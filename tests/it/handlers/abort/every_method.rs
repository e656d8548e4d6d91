//! Every method reaches the inner handler, and the inner handler's answer is returned.
//!
//! A wrapper that lacks a method with a default body still compiles, but the inner handler never gets those requests.
//! The names are therefore read from rmcp's source, so that a method added in a later version fails this test until the
//! wrapper forwards it.

use mcp_cancel_on_disconnect::AbortOnCancel;
use rmcp::{
    ServerHandler,
    model::{ErrorCode, SubscriptionFilter},
};
use serde_json::json;

use super::{
    methods_of_rmcp,
    recorder::{MethodLog, RECORDED, Recorder, initialize, notifications, requests, versions},
    wire::Wire,
};
use crate::support::within;

#[tokio::test]
async fn every_method_of_rmcps_trait_is_forwarded() {
    let (handler, log) = recorder();
    let mut wire = Wire::to(handler.clone());
    let mut expected = 0;
    for (method, params, _) in requests() {
        expected += 1;
        wire.request(expected, method, params);
        wire.answer().await;
    }
    for (method, params) in notifications() {
        wire.notify(method, params);
    }
    let all = async {
        // Notifications have no answer. One of the `on_` methods handles a request.
        while log
            .names()
            .iter()
            .filter(|name| name.starts_with("on_"))
            .count()
            < 6
        {
            tokio::task::yield_now().await;
        }
    };
    within("five notifications", all).await;
    handler.get_info();
    handler.get_tool("a tool");
    handler.supported_protocol_versions();
    handler.accepted_subscription_filter(&SubscriptionFilter::default());
    let _result = handler.negotiate_initialize(&initialize());

    assert_eq!(log.names(), methods_of_rmcp::names());
}

#[tokio::test]
async fn what_a_method_returns_is_forwarded() {
    let (handler, _) = recorder();
    let mut wire = Wire::to(handler);
    for (method, params, name) in requests() {
        wire.request(1, method, params);
        let answer = wire.answer().await;
        let expected = json!({ "code": RECORDED, "message": name });
        assert_eq!(answer["error"], expected, "{method}: {answer}");
    }
}

#[test]
fn values_without_a_request_are_forwarded() {
    let (handler, _) = recorder();
    assert_eq!(handler.get_info().instructions.as_deref(), Some("recorded"));
    assert_eq!(handler.get_tool("any").expect("a tool").name, "any");
    assert_eq!(*handler.supported_protocol_versions(), versions());
    let filter = SubscriptionFilter::default();
    assert!(handler.accepted_subscription_filter(&filter).is_some());
    let error = handler.negotiate_initialize(&initialize()).unwrap_err();
    assert_eq!(error.code, ErrorCode(RECORDED));
}

/// The control: a method that only has its default body does not count as forwarded.
#[test]
fn the_names_are_taken_from_the_trait() {
    let names = methods_of_rmcp::names();
    assert!(names.len() > 30, "{names:?}");
    for name in [
        "call_tool",
        "listen",
        "on_cancelled",
        "get_info",
        "get_skill",
    ] {
        assert!(names.contains(name), "{name}");
    }
    assert!(!names.contains("handle_request"), "{names:?}");
}

fn recorder() -> (AbortOnCancel<Recorder>, MethodLog) {
    let recorder = Recorder::default();
    let log = recorder.log().clone();
    (AbortOnCancel::new(recorder), log)
}
