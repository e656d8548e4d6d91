use std::{
    sync::{Arc, atomic::AtomicUsize},
    task::Wake,
};

use rmcp::{
    ErrorData,
    model::{
        CancelledNotification, CancelledNotificationParam, ClientResult, EmptyResult, Extensions,
        JsonRpcError, NumberOrString, PingRequest, ProgressNotification, ProgressNotificationParam,
        ProgressToken, ServerResult,
    },
};

use super::*;

fn call(id: i64, progress: Option<i64>) -> CallInfo {
    let mut call = CallInfo::new(RequestId::Number(id), "tools/call");
    call.set_progress_token(progress.map(RequestId::Number));
    call
}

fn answer(id: i64) -> ServerJsonRpcMessage {
    let empty = ServerResult::EmptyResult(EmptyResult {});
    ServerJsonRpcMessage::response(empty, NumberOrString::Number(id))
}

fn error(id: i64) -> ServerJsonRpcMessage {
    let error = ErrorData::internal_error("broken", None);
    ServerJsonRpcMessage::error(error, Some(NumberOrString::Number(id)))
}

fn progress(token: i64) -> ServerJsonRpcMessage {
    let token = ProgressToken(NumberOrString::Number(token));
    let progress = ProgressNotification::new(ProgressNotificationParam::new(token, 1.0));
    ServerJsonRpcMessage::notification(ServerNotification::ProgressNotification(progress))
}

fn ping(origin: i64) -> ServerJsonRpcMessage {
    ping_with(99, origin)
}

fn ping_with(id: i64, origin: i64) -> ServerJsonRpcMessage {
    let mut extensions = Extensions::new();
    extensions.insert(OriginatingRequestId(NumberOrString::Number(origin)));
    let ping = ServerRequest::PingRequest(PingRequest {
        method: Default::default(),
        extensions,
    });
    ServerJsonRpcMessage::request(ping, NumberOrString::Number(id))
}

#[test]
fn no_message_of_a_cancelled_call_is_sent() {
    let suppressed = Suppressed::default();
    suppressed.suppress(&call(7, Some(70)));
    assert_eq!(suppressed.decide(&answer(7)), SendDecision::Drop);
    assert_eq!(suppressed.decide(&error(7)), SendDecision::Drop);
    assert_eq!(suppressed.decide(&progress(70)), SendDecision::Drop);
    assert_eq!(suppressed.decide(&ping(7)), SendDecision::Refuse);
}

#[test]
fn messages_from_other_calls_are_sent() {
    let suppressed = Suppressed::default();
    suppressed.suppress(&call(7, None));
    for message in [answer(8), error(8), progress(7), ping(8)] {
        assert_eq!(suppressed.decide(&message), SendDecision::Send);
    }
}

#[test]
fn a_new_call_with_the_ids_of_a_cancelled_one_is_not_suppressed() {
    let suppressed = Suppressed::default();
    suppressed.suppress(&call(7, Some(70)));
    suppressed.suppress(&call(8, Some(80)));
    suppressed.resume_delivery(&call(7, None));
    suppressed.resume_delivery(&call(9, Some(80)));
    for message in [answer(7), progress(80)] {
        assert_eq!(suppressed.decide(&message), SendDecision::Send);
    }
    for message in [progress(70), answer(8)] {
        assert_eq!(
            suppressed.decide(&message),
            SendDecision::Drop,
            "it belongs to the cancelled call"
        );
    }
}

#[test]
fn an_untracked_call_is_not_suppressed_whenever_one_with_its_ids_is_cancelled() {
    for is_cancelled_first in [true, false] {
        let suppressed = Suppressed::default();
        if is_cancelled_first {
            suppressed.suppress(&call(7, Some(70)));
        }
        suppressed.resume_delivery_untracked(&call(7, Some(70)));
        if !is_cancelled_first {
            suppressed.suppress(&call(7, Some(70)));
        }
        for message in [progress(70), answer(7)] {
            assert_eq!(suppressed.decide(&message), SendDecision::Send);
        }
        // A tracked call reuses the ids and is cancelled.
        suppressed.resume_delivery(&call(7, Some(70)));
        suppressed.suppress(&call(7, Some(70)));
        for message in [answer(7), progress(70)] {
            assert_eq!(suppressed.decide(&message), SendDecision::Drop);
        }
    }
}

#[test]
fn untracked_calls_count_only_while_they_run() {
    let suppressed = Suppressed::default();
    suppressed.suppress(&call(-1, Some(-1)));
    for id in 0..=MAX_SUPPRESSED as i64 {
        suppressed.resume_delivery_untracked(&call(id, Some(id)));
        if id % 2 == 0 {
            assert_eq!(suppressed.decide(&answer(id)), SendDecision::Send);
        } else {
            // The call has been refused, or cancelled by its client.
            suppressed.forget_untracked(&RequestId::Number(id));
        }
    }
    for message in [answer(-1), progress(-1)] {
        assert_eq!(suppressed.decide(&message), SendDecision::Drop);
    }
}

#[test]
fn with_too_many_untracked_calls_nothing_is_suppressed() {
    let suppressed = Suppressed::default();
    for id in 0..=MAX_SUPPRESSED as i64 {
        suppressed.resume_delivery_untracked(&call(id, Some(id)));
    }
    suppressed.suppress(&call(0, Some(0)));
    for message in [answer(0), progress(0)] {
        assert_eq!(suppressed.decide(&message), SendDecision::Send);
    }
}

fn reply(id: i64) -> RxJsonRpcMessage<RoleServer> {
    let empty = ClientResult::EmptyResult(EmptyResult {});
    JsonRpcMessage::response(empty, NumberOrString::Number(id))
}

/// Returns the sorted ids of the requests to the client that are answered with an error.
fn ids_of_error_replies(suppressed: &Suppressed) -> Vec<i64> {
    let replies = std::iter::from_fn(|| suppressed.error_reply());
    let ids = replies.map(|reply| match reply {
        JsonRpcMessage::Error(JsonRpcError {
            id: Some(NumberOrString::Number(id)),
            error,
            ..
        }) if error.code.0 == -32_800 => id,
        other => panic!("expected an error for the server, got {other:?}"),
    });
    let mut ids: Vec<_> = ids.collect();
    ids.sort_unstable();
    ids
}

#[test]
fn a_cancelled_calls_requests_to_the_client_are_answered() {
    let suppressed = Suppressed::default();
    for (id, origin) in [(1, 7), (2, 8), (3, 7)] {
        assert_eq!(
            suppressed.decide(&ping_with(id, origin)),
            SendDecision::Send
        );
    }
    assert_eq!(ids_of_error_replies(&suppressed), [] as [i64; 0]);
    suppressed.suppress(&call(7, None));
    assert_eq!(ids_of_error_replies(&suppressed), [1, 3]);
    assert_eq!(ids_of_error_replies(&suppressed), [] as [i64; 0]);
    suppressed.suppress(&call(8, None));
    assert_eq!(ids_of_error_replies(&suppressed), [2]);
}

#[test]
fn a_request_to_the_client_that_was_answered_is_not_answered_again() {
    let suppressed = Suppressed::default();
    suppressed.decide(&ping_with(1, 7));
    suppressed.decide(&ping_with(2, 7));
    suppressed.on_received(&reply(1));
    let refusal = ErrorData::internal_error("no", None);
    suppressed.on_received(&JsonRpcMessage::error(
        refusal,
        Some(NumberOrString::Number(2)),
    ));
    suppressed.suppress(&call(7, None));
    assert_eq!(ids_of_error_replies(&suppressed), [] as [i64; 0]);
}

#[test]
fn no_state_is_kept_for_a_session_whose_calls_have_ended() {
    let suppressed = Suppressed::default();
    assert!(!suppressed.is_active());
    suppressed.decide(&ping_with(1, 7));
    suppressed.decide(&ping_with(2, 8));
    assert!(suppressed.is_active());
    assert_eq!(suppressed.decide(&answer(7)), SendDecision::Send);
    assert_eq!(suppressed.decide(&error(8)), SendDecision::Send);
    assert!(!suppressed.is_active());
}

#[test]
fn the_receiver_is_woken_for_an_error_reply() {
    let suppressed = Suppressed::default();
    let (waker, wakes) = counting_waker();
    suppressed.register_waker(&waker);
    suppressed.decide(&ping_with(1, 7));
    suppressed.register_waker(&waker);
    suppressed.suppress(&call(8, None));
    suppressed.register_waker(&waker);
    let before = wakes.load(Ordering::Relaxed);
    suppressed.suppress(&call(7, None));
    assert_eq!(wakes.load(Ordering::Relaxed), before + 1);
}

fn counting_waker() -> (Waker, Arc<AtomicUsize>) {
    struct Count(Arc<AtomicUsize>);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(AtomicUsize::new(0));
    (Arc::new(Count(wakes.clone())).into(), wakes)
}

#[test]
fn only_the_latest_cancelled_calls_are_suppressed() {
    let suppressed = Suppressed::default();
    for id in 0..=MAX_SUPPRESSED as i64 {
        suppressed.suppress(&call(id, None));
    }
    assert_eq!(suppressed.decide(&answer(0)), SendDecision::Send);
    assert_eq!(suppressed.decide(&answer(1)), SendDecision::Drop);
    assert_eq!(suppressed.state().cancelled.len(), MAX_SUPPRESSED);
}

/// A long call whose client never answers, so that rmcp cancels each request to the client.
#[test]
fn a_request_to_the_client_that_its_handler_cancelled_is_removed() {
    let suppressed = Suppressed::default();
    for id in 0..1_000 {
        assert_eq!(suppressed.decide(&ping_with(id, 7)), SendDecision::Send);
        let id = Some(NumberOrString::Number(id));
        let cancelled = CancelledNotificationParam::new(id, Some("request timeout".into()));
        let cancelled = CancelledNotification::new(cancelled);
        let cancelled = ServerNotification::CancelledNotification(cancelled);
        let cancelled = ServerJsonRpcMessage::notification(cancelled);
        assert_eq!(suppressed.decide(&cancelled), SendDecision::Send);
    }
    assert!(suppressed.state().requests_to_client.is_empty());
}
