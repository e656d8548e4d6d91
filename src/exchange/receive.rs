//! The receipt of a request: what it is to the layer, from its head.

use std::sync::Arc;

use http::{Method, Request};

use super::{
    identity::{Revision, SessionHeader},
    state::{Exchange, Instance, RequestKind, Resume},
};
use crate::{call::Scope, fields::Fields};

// === impl Exchange ===

impl Exchange {
    pub(crate) fn new<B>(
        instance: Arc<Instance>,
        request: &Request<B>,
        fields: &Fields<'_>,
    ) -> Self {
        let session = SessionHeader::of(fields.session_id);
        let revision = Revision::of(fields.protocol_version);
        let kind = RequestKind::of(&instance, request, &session);
        Self::of_parts(instance, session, revision, kind)
    }
}

// === impl RequestKind ===

impl RequestKind {
    fn of<B>(instance: &Instance, request: &Request<B>, session: &SessionHeader) -> Self {
        let path = request.uri().path();
        match *request.method() {
            Method::POST => Self::Post,
            Method::GET => {
                let resume = session
                    .key(|id| instance.scope_of(id, path))
                    .and_then(|session| Resume::receive(instance, session, request.headers()));
                resume.map_or(Self::Other, |resume| Self::Resume(Box::new(resume)))
            }
            Method::DELETE => session
                .key(|_| Scope::Path(path.into()))
                .map_or(Self::Other, |session| Self::Delete(Box::new(session))),
            _ => Self::Other,
        }
    }
}

impl Instance {
    /// Who gave out a session id that came to a path: the session manager that knows it, or the path's server.
    fn scope_of(&self, id: &str, path: &str) -> Scope {
        let manager = self.registry.manager_of(id);
        manager.unwrap_or_else(|| Scope::Path(path.into()))
    }
}
