//! Calls of typed messages, bound to the exchanges that they came with.

use std::{hash::BuildHasher, sync::Arc};

use http::request::Parts;
use rmcp::{
    model::{ClientJsonRpcMessage, ClientRequest, Extensions, GetExtensions, GetMeta},
    transport::streamable_http_server::{SessionManager, session::SessionId},
};
use serde_json::Value;

use super::{opening::Untracked, session::InUse, shared::SharedManager, stream::BoundCall};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId},
    exchange::{Contest, Exchange},
    observe::Remark,
    token::CallToken,
};

/// Has the handler of a further attempt find the call that this attempt made.
#[cold]
fn relink(extensions: &mut Extensions, exchange: &Arc<Exchange>) {
    if let Some(parts) = extensions.get_mut::<Parts>() {
        parts.extensions.insert(CallToken::new(exchange.clone()));
    }
}

// === impl SharedManager ===

impl<M: SessionManager> SharedManager<M> {
    /// Binds the call in `message` to the exchange it came with.
    pub(super) fn bind(
        self: &Arc<Self>,
        session: &SessionId,
        message: &mut ClientJsonRpcMessage,
    ) -> Option<BoundCall> {
        let ClientJsonRpcMessage::Request(request) = message else {
            return None;
        };
        let Some(link) = CallToken::in_message(request.request.extensions()) else {
            self.remarks.make(Remark::NoLayer);
            return None;
        };
        let exchange = link.exchange().clone();
        if !self.belongs_to(exchange.registry()) {
            exchange.registry().remarks.make(Remark::TwoLayers);
            return None;
        }
        // rmcp has no `params.task`, so its handlers know of no task either.
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
        Some(BoundCall::opening(attachment, self.form()))
    }

    /// The request in a message that is not bound. Returns `None` if it is none, or if no request came through a layer yet: then
    /// nothing is muted, and no call in flight can have its id.
    #[cold]
    pub(super) fn untracked(
        &self,
        session: &SessionId,
        message: &ClientJsonRpcMessage,
        used: Option<&InUse>,
    ) -> Option<Box<Untracked>> {
        let ClientJsonRpcMessage::Request(request) = message else {
            return None;
        };
        let registry = self.registry.get()?;
        let mut call = CallInfo::new((&request.id).into(), request.request.method());
        let token = request.request.get_meta().get_progress_token();
        call.set_progress_token(token.map(|token| (&token.0).into()));
        let key = Key {
            session: self.key_of(session),
            request: call.request_id().clone(),
        };
        let contest = Contest::begin(registry, &key);
        let used = used.map(InUse::again);
        Some(Box::new(Untracked::new(call, contest, used)))
    }

    /// A keyed hash of a request: of its method, and its parameters without `_meta`, which is another one each time.
    fn fingerprint(&self, request: &ClientRequest) -> u64 {
        // A request that was parsed always serializes.
        let mut request = serde_json::to_value(request).unwrap_or_default();
        if let Some(params) = request.get_mut("params").and_then(Value::as_object_mut) {
            params.remove("_meta");
        }
        self.hasher.hash_one(request.to_string())
    }

    /// The manager took the client's own cancel of a call. Meanwhile that may have ended, and another may have its id.
    pub(super) fn client_cancelled(&self, session: &SessionId, request: RequestId, meant: CallId) {
        let found = self.find(session, request);
        if let Some((id, exchange)) = found.filter(|(id, _)| *id == meant) {
            if let Some(call) = exchange.call(id) {
                self.mute(session, call);
            }
            exchange.cancelled_elsewhere(id, CancelReason::ClientCancelled);
        }
    }
}
