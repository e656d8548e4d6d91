//! Classifies requests by their heads.

use std::sync::Arc;

use http::{Method, Request};

use super::{
    identity::{Revision, SessionHeader},
    state::{Exchange, LayerShared, Phase, RequestKind, Resume},
};
use crate::{
    call::Scope,
    headers::{Header, McpHeaders, accepts_events, is_certainly_not_json},
};

// === impl Exchange ===

impl Exchange {
    pub(crate) fn new<B>(
        shared: Arc<LayerShared>,
        request: &Request<B>,
        headers: &McpHeaders<'_>,
    ) -> Self {
        let session = SessionHeader::from_header(headers.session_id);
        let revision = Revision::from_header(headers.protocol_version);
        let kind = RequestKind::classify(&shared, request, &session, headers.content_type);
        let date = Revision::date(headers.protocol_version);
        Self::from_parts(shared, session, revision, date, kind)
    }

    /// Creates an exchange for a request sent by the layer itself.
    ///
    /// The exchange has already ended, so its token never fires.
    pub(crate) fn for_replay(shared: Arc<LayerShared>) -> Self {
        let session = SessionHeader::None;
        let revision = Revision::WithSessions;
        let exchange = Self::from_parts(shared, session, revision, None, RequestKind::Replay);
        exchange.state().phase = Phase::Ended;
        exchange.signal.disarm();
        exchange
    }

    pub(crate) fn is_replay(&self) -> bool {
        matches!(self.kind, RequestKind::Replay)
    }
}

// === impl RequestKind ===

impl RequestKind {
    fn classify<B>(
        shared: &LayerShared,
        request: &Request<B>,
        session: &SessionHeader,
        content_type: Header<'_>,
    ) -> Self {
        let scope = || Scope::of_request(request.uri(), request.extensions());
        match *request.method() {
            Method::POST if is_certainly_not_json(content_type) => Self::Other,
            Method::POST => Self::Post(shared.options.extensions_for(request)),
            Method::GET => {
                let resume = session
                    .key(|id| shared.registry.manager_scope(id).unwrap_or_else(scope))
                    .and_then(|session| Resume::begin(shared, session, request.headers()));
                match resume {
                    Some(resume) => Self::Resume(Box::new(resume)),
                    None if !session.is_none() => Self::Listen {
                        accepts_events: accepts_events(request.headers()),
                    },
                    None => Self::Other,
                }
            }
            Method::DELETE => session
                .key(|_| scope())
                .map_or(Self::Other, |session| Self::Delete(Box::new(session))),
            _ => Self::Other,
        }
    }
}
