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
fn nothing_of_a_cancelled_call_gets_out() {
    let muted = Muted::default();
    muted.mute(&call(7, Some(70)));
    assert_eq!(muted.fate(&answer(7)), Fate::Dropped);
    assert_eq!(muted.fate(&error(7)), Fate::Dropped);
    assert_eq!(muted.fate(&progress(70)), Fate::Dropped);
    assert_eq!(muted.fate(&ping(7)), Fate::Refused);
}

#[test]
fn everything_of_another_call_gets_out() {
    let muted = Muted::default();
    muted.mute(&call(7, None));
    for message in [answer(8), error(8), progress(7), ping(8)] {
        assert_eq!(muted.fate(&message), Fate::Sent);
    }
}

#[test]
fn a_new_call_with_the_ids_of_a_cancelled_one_is_heard() {
    let muted = Muted::default();
    muted.mute(&call(7, Some(70)));
    muted.mute(&call(8, Some(80)));
    muted.unmute(&call(7, None));
    muted.unmute(&call(9, Some(80)));
    for message in [answer(7), progress(80)] {
        assert_eq!(muted.fate(&message), Fate::Sent);
    }
    for message in [progress(70), answer(8)] {
        assert_eq!(muted.fate(&message), Fate::Dropped, "of the cancelled one");
    }
}

#[test]
fn a_call_that_is_not_tracked_is_heard_whenever_one_with_its_ids_is_cancelled() {
    for is_cancelled_first in [true, false] {
        let muted = Muted::default();
        if is_cancelled_first {
            muted.mute(&call(7, Some(70)));
        }
        muted.unmute_untracked(&call(7, Some(70)));
        if !is_cancelled_first {
            muted.mute(&call(7, Some(70)));
        }
        for message in [progress(70), answer(7)] {
            assert_eq!(muted.fate(&message), Fate::Sent);
        }
        // A call that is tracked has them next, and is cancelled.
        muted.unmute(&call(7, Some(70)));
        muted.mute(&call(7, Some(70)));
        for message in [answer(7), progress(70)] {
            assert_eq!(muted.fate(&message), Fate::Dropped);
        }
    }
}

#[test]
fn calls_that_are_not_tracked_count_only_while_they_run() {
    let muted = Muted::default();
    muted.mute(&call(-1, Some(-1)));
    for id in 0..=REMEMBERED as i64 {
        muted.unmute_untracked(&call(id, Some(id)));
        if id % 2 == 0 {
            assert_eq!(muted.fate(&answer(id)), Fate::Sent);
        } else {
            // It was refused, or cancelled by its client.
            muted.forget_untracked(&RequestId::Number(id));
        }
    }
    for message in [answer(-1), progress(-1)] {
        assert_eq!(muted.fate(&message), Fate::Dropped);
    }
}

#[test]
fn where_too_many_calls_are_not_tracked_nothing_is_muted() {
    let muted = Muted::default();
    for id in 0..=REMEMBERED as i64 {
        muted.unmute_untracked(&call(id, Some(id)));
    }
    muted.mute(&call(0, Some(0)));
    for message in [answer(0), progress(0)] {
        assert_eq!(muted.fate(&message), Fate::Sent);
    }
}

fn reply(id: i64) -> RxJsonRpcMessage<RoleServer> {
    let nothing = ClientResult::EmptyResult(EmptyResult {});
    JsonRpcMessage::response(nothing, NumberOrString::Number(id))
}

/// The ids of all answers that wait.
fn answers(muted: &Muted) -> Vec<i64> {
    let answers = std::iter::from_fn(|| muted.answer());
    let ids = answers.map(|answer| match answer {
        JsonRpcMessage::Error(JsonRpcError {
            id: Some(NumberOrString::Number(id)),
            error,
            ..
        }) if error.code.0 == -32_800 => id,
        other => panic!("an error for the server and not {other:?}"),
    });
    let mut ids: Vec<_> = ids.collect();
    ids.sort_unstable();
    ids
}

#[test]
fn what_a_call_has_asked_is_answered_when_it_is_cancelled() {
    let muted = Muted::default();
    for (id, origin) in [(1, 7), (2, 8), (3, 7)] {
        assert_eq!(muted.fate(&ping_with(id, origin)), Fate::Sent);
    }
    assert_eq!(answers(&muted), [] as [i64; 0]);
    muted.mute(&call(7, None));
    assert_eq!(answers(&muted), [1, 3]);
    assert_eq!(answers(&muted), [] as [i64; 0]);
    muted.mute(&call(8, None));
    assert_eq!(answers(&muted), [2]);
}

#[test]
fn what_the_client_has_answered_is_not_answered_again() {
    let muted = Muted::default();
    muted.fate(&ping_with(1, 7));
    muted.fate(&ping_with(2, 7));
    muted.received(&reply(1));
    let refusal = ErrorData::internal_error("no", None);
    muted.received(&JsonRpcMessage::error(
        refusal,
        Some(NumberOrString::Number(2)),
    ));
    muted.mute(&call(7, None));
    assert_eq!(answers(&muted), [] as [i64; 0]);
}

#[test]
fn nothing_is_kept_of_a_session_whose_calls_have_ended() {
    let muted = Muted::default();
    assert!(!muted.any());
    muted.fate(&ping_with(1, 7));
    muted.fate(&ping_with(2, 8));
    assert!(muted.any());
    assert_eq!(muted.fate(&answer(7)), Fate::Sent);
    assert_eq!(muted.fate(&error(8)), Fate::Sent);
    assert!(!muted.any());
}

#[test]
fn who_receives_is_woken_for_an_answer() {
    let muted = Muted::default();
    let (waker, wakes) = counting();
    muted.wake(&waker);
    muted.fate(&ping_with(1, 7));
    muted.wake(&waker);
    muted.mute(&call(8, None));
    muted.wake(&waker);
    let before = wakes.load(Ordering::Relaxed);
    muted.mute(&call(7, None));
    assert_eq!(wakes.load(Ordering::Relaxed), before + 1);
}

fn counting() -> (Waker, Arc<AtomicUsize>) {
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
fn only_the_latest_are_remembered() {
    let muted = Muted::default();
    for id in 0..=REMEMBERED as i64 {
        muted.mute(&call(id, None));
    }
    assert_eq!(muted.fate(&answer(0)), Fate::Sent);
    assert_eq!(muted.fate(&answer(1)), Fate::Dropped);
    assert_eq!(muted.state().cancelled.len(), REMEMBERED);
}

/// A long call whose client never answers: rmcp tells that client each time that nobody waits any more.
#[test]
fn a_question_that_its_handler_has_given_up_is_not_kept() {
    let muted = Muted::default();
    for id in 0..1_000 {
        assert_eq!(muted.fate(&ping_with(id, 7)), Fate::Sent);
        let id = Some(NumberOrString::Number(id));
        let given_up = CancelledNotificationParam::new(id, Some("request timeout".into()));
        let given_up = CancelledNotification::new(given_up);
        let given_up = ServerNotification::CancelledNotification(given_up);
        let given_up = ServerJsonRpcMessage::notification(given_up);
        assert_eq!(muted.fate(&given_up), Fate::Sent);
    }
    assert!(muted.state().asked.is_empty());
}
