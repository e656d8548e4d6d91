//! What the cancelled calls of a session may still send, and where it goes: nowhere.
//!
//! rmcp drops the answer of a cancelled request, but not one that was on its way already, nor progress
//! or requests of a handler that goes on; bare, they come out of the session's standalone stream.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rmcp::{
    model::{GetExtensions, NumberOrString, ServerJsonRpcMessage, ServerNotification},
    service::OriginatingRequestId,
};

use crate::call::{CallInfo, RequestId};

/// How many cancelled calls a session remembers: 256. A handler that outlives so many others is beyond
/// keeping quiet.
const REMEMBERED: usize = 256;

/// The cancelled calls of a session.
#[derive(Debug, Default)]
pub(super) struct Late {
    any: AtomicBool,
    calls: Mutex<VecDeque<Cancelled>>,
}

#[derive(Debug)]
struct Cancelled {
    request_id: RequestId,
    progress_token: Option<RequestId>,
}

/// What becomes of a message from a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Sent,
    Dropped,
    /// Its sender waits for a reply that cannot come.
    Refused,
}

// === impl Late ===

impl Late {
    /// From now on the call is cancelled.
    pub(super) fn condemn(&self, call: &CallInfo) {
        let mut calls = self.calls();
        if calls.len() == REMEMBERED {
            calls.pop_front();
        }
        calls.push_back(Cancelled {
            request_id: call.request_id().clone(),
            progress_token: call.progress_token().cloned(),
        });
        self.any.store(true, Ordering::Release);
    }

    /// A new call came with the ids of a cancelled one.
    pub(super) fn forgive(&self, call: &CallInfo) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut calls = self.calls();
        calls.retain(|cancelled| {
            let token = call.progress_token();
            cancelled.request_id != *call.request_id()
                && (token.is_none() || cancelled.progress_token.as_ref() != token)
        });
        self.any.store(!calls.is_empty(), Ordering::Release);
    }

    pub(super) fn fate(&self, message: &ServerJsonRpcMessage) -> Fate {
        if !self.any.load(Ordering::Acquire) {
            return Fate::Sent;
        }
        let (late, fate) = match message {
            ServerJsonRpcMessage::Response(response) => (self.has(&response.id), Fate::Dropped),
            ServerJsonRpcMessage::Error(error) => (
                error.id.as_ref().is_some_and(|id| self.has(id)),
                Fate::Dropped,
            ),
            ServerJsonRpcMessage::Notification(message) => match &message.notification {
                ServerNotification::ProgressNotification(progress) => (
                    self.has_token(&progress.params.progress_token.0),
                    Fate::Dropped,
                ),
                _ => (false, Fate::Sent),
            },
            ServerJsonRpcMessage::Request(message) => {
                let origin = message.request.extensions().get::<OriginatingRequestId>();
                (
                    origin.is_some_and(|origin| self.has(&origin.0)),
                    Fate::Refused,
                )
            }
        };
        if late { fate } else { Fate::Sent }
    }

    fn has(&self, id: &NumberOrString) -> bool {
        let id = RequestId::from(id);
        self.calls().iter().any(|call| call.request_id == id)
    }

    fn has_token(&self, token: &NumberOrString) -> bool {
        let token = Some(RequestId::from(token));
        self.calls().iter().any(|call| call.progress_token == token)
    }

    fn calls(&self) -> MutexGuard<'_, VecDeque<Cancelled>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{
        EmptyResult, ErrorData, Extensions, PingRequest, ProgressNotification,
        ProgressNotificationParam, ProgressToken, ServerRequest, ServerResult,
    };

    use super::*;

    fn call(id: i64, progress: Option<i64>) -> CallInfo {
        CallInfo::new(RequestId::Number(id), "tools/call")
            .with_progress_token(progress.map(RequestId::Number))
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
        let mut extensions = Extensions::new();
        extensions.insert(OriginatingRequestId(NumberOrString::Number(origin)));
        let ping = ServerRequest::PingRequest(PingRequest {
            method: Default::default(),
            extensions,
        });
        ServerJsonRpcMessage::request(ping, NumberOrString::Number(99))
    }

    #[test]
    fn nothing_of_a_cancelled_call_gets_out() {
        let late = Late::default();
        late.condemn(&call(7, Some(70)));
        assert_eq!(late.fate(&answer(7)), Fate::Dropped);
        assert_eq!(late.fate(&error(7)), Fate::Dropped);
        assert_eq!(late.fate(&progress(70)), Fate::Dropped);
        assert_eq!(late.fate(&ping(7)), Fate::Refused);
    }

    #[test]
    fn everything_of_another_call_gets_out() {
        let late = Late::default();
        late.condemn(&call(7, None));
        for message in [answer(8), error(8), progress(7), ping(8)] {
            assert_eq!(late.fate(&message), Fate::Sent);
        }
    }

    #[test]
    fn a_new_call_with_the_ids_of_a_cancelled_one_is_heard() {
        let late = Late::default();
        late.condemn(&call(7, Some(70)));
        late.condemn(&call(8, Some(80)));
        late.forgive(&call(7, None));
        late.forgive(&call(9, Some(80)));
        for message in [answer(7), progress(70), answer(8), progress(80)] {
            assert_eq!(late.fate(&message), Fate::Sent);
        }
    }

    #[test]
    fn only_the_latest_are_remembered() {
        let late = Late::default();
        for id in 0..=REMEMBERED as i64 {
            late.condemn(&call(id, None));
        }
        assert_eq!(late.fate(&answer(0)), Fate::Sent);
        assert_eq!(late.fate(&answer(1)), Fate::Dropped);
        assert_eq!(late.calls().len(), REMEMBERED);
    }
}
