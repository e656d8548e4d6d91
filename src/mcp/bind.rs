//! Calls of typed messages, bound to the exchanges that they came with.

use std::{hash::BuildHasher, sync::Arc};

use rmcp::{
    model::{ClientJsonRpcMessage, ClientRequest, GetExtensions, GetMeta},
    transport::streamable_http_server::{SessionManager, session::SessionId},
};

use super::{shared::SharedManager, stream::BoundCall};
use crate::{
    call::{CallId, CallInfo, CancelReason, RequestId},
    exchange::Attachment,
    observe::Remark,
    registry::FIRST,
    token::CallToken,
};

// === impl SharedManager ===

impl<M: SessionManager> SharedManager<M> {
    /// Binds the call in `message` to the exchange it came with.
    pub(super) fn bind(
        self: &Arc<Self>,
        session: &SessionId,
        message: &ClientJsonRpcMessage,
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
        let (tool, arguments) = match &request.request {
            ClientRequest::CallToolRequest(call) => {
                (Some(&*call.params.name), call.params.arguments.as_ref())
            }
            _ => (None, None),
        };
        let progress = request.request.get_meta().get_progress_token();
        let mut call = CallInfo::new((&request.id).into(), request.request.method());
        call.set_tool(tool);
        call.set_session(Some(session.clone()));
        call.set_progress_token(progress.map(|token| (&token.0).into()));
        // A keyed hash. An object that was parsed always serializes, and with sorted keys.
        let fingerprint = || {
            let arguments = serde_json::to_string(&arguments).unwrap_or_default();
            self.hasher.hash_one(arguments)
        };
        let id = exchange.bind(call, self.clone(), fingerprint)?;
        let attachment = Attachment {
            exchange,
            id,
            generation: FIRST,
        };
        Some(BoundCall::new(attachment, self.form()))
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
