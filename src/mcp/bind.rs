//! Binds each call that the session manager receives to its exchange.

use std::{hash::BuildHasher, sync::Arc};

use http::request::Parts;
use rmcp::{
    model::{ClientJsonRpcMessage, ClientRequest, Extensions, GetExtensions, GetMeta},
    transport::streamable_http_server::{SessionManager, session::SessionId},
};
use serde_json::Value;

use super::{
    create_stream::Untracked, inner::ManagerInner, session_use::SessionUse, stream::BoundCall,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId},
    exchange::{Cancel, Contest, Exchange},
    observe::Hint,
    token::CallToken,
};

/// Links a retry's handler to the first attempt's call.
#[cold]
fn relink(extensions: &mut Extensions, exchange: &Arc<Exchange>) {
    if let Some(parts) = extensions.get_mut::<Parts>() {
        parts.extensions.insert(CallToken::new(exchange.clone()));
    }
}

// === impl ManagerInner ===

impl<M: SessionManager> ManagerInner<M> {
    /// Binds the call in `message` to its exchange.
    ///
    /// Returns `None` if the message is not a request, if its exchange does not track it, or if it has not passed through the
    /// layer whose registry this manager has joined.
    pub(super) fn bind(
        self: &Arc<Self>,
        session: &SessionId,
        message: &mut ClientJsonRpcMessage,
    ) -> Option<BoundCall> {
        let ClientJsonRpcMessage::Request(request) = message else {
            return None;
        };
        let Some(call_token) = CallToken::in_message(request.request.extensions()) else {
            self.hints.emit(Hint::NoLayer);
            return None;
        };
        let exchange = call_token.exchange().clone();
        if !self.join_registry(exchange.registry()) {
            exchange.registry().hints.emit(Hint::TwoLayers);
            return None;
        }
        // rmcp does not support `params.task`, so the call has no task to record.
        let tool = match &request.request {
            ClientRequest::CallToolRequest(call) => Some(&*call.params.name),
            _ => None,
        };
        let progress = request.request.get_meta().get_progress_token();
        let mut call = CallInfo::new((&request.id).into(), request.request.method());
        call.set_tool(tool);
        call.set_session(Some(session.clone()));
        call.set_progress_token(progress.map(|token| (&token.0).into()));
        let fingerprint = || self.fingerprint(&request.request);
        let attachment = exchange.bind(call, self.clone(), fingerprint)?;
        if !Arc::ptr_eq(&attachment.exchange, &exchange) {
            relink(request.request.extensions_mut(), &attachment.exchange);
        }
        Some(BoundCall::dispatching(attachment, self.event_id_format()))
    }

    /// Creates an [`Untracked`] request for an unbound message.
    ///
    /// This also starts a contest with any older call that has the same id.
    ///
    /// Returns `None` if the message is not a request, or if no request has passed through a layer yet. Up to that point, nothing
    /// is suppressed and no in-flight call can have the request's id.
    #[cold]
    pub(super) fn untracked(
        &self,
        session: &SessionId,
        message: &ClientJsonRpcMessage,
        session_use: Option<&SessionUse>,
    ) -> Option<Box<Untracked>> {
        let ClientJsonRpcMessage::Request(request) = message else {
            return None;
        };
        let registry = self.registry.get()?;
        let mut call = CallInfo::new((&request.id).into(), request.request.method());
        let token = request.request.get_meta().get_progress_token();
        call.set_progress_token(token.map(|token| (&token.0).into()));
        let key = Key {
            session: self.session_key(session),
            request: call.request_id().clone(),
        };
        let contest = Contest::begin(registry, &key);
        let session_use = session_use.cloned();
        Some(Box::new(Untracked::new(call, contest, session_use)))
    }

    /// Returns a keyed hash of the method and the parameters, excluding `_meta`.
    ///
    /// `_meta` is left out because a client might change it when it resends the call.
    fn fingerprint(&self, request: &ClientRequest) -> u64 {
        // A parsed request can always be serialized.
        let mut request = serde_json::to_value(request).unwrap_or_default();
        if let Some(params) = request.get_mut("params").and_then(Value::as_object_mut) {
            params.remove("_meta");
        }
        self.hasher.hash_one(request.to_string())
    }

    /// Handles a client's cancellation once the manager has accepted it.
    ///
    /// Does nothing if `target` has ended in the meantime, even if another call has reused its id.
    pub(super) fn on_client_cancel(&self, session: &SessionId, request: RequestId, target: CallId) {
        let call = self.find(session, request);
        if let Some((id, exchange)) = call.filter(|(id, _)| *id == target) {
            if let Some(call) = exchange.call(id) {
                self.suppress(session, call);
            }
            exchange.cancel(id, Cancel::external(CancelReason::ClientCancelled));
        }
    }
}
