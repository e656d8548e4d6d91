//! Tracks unanswered requests that a session's calls have made to their client.

use std::collections::HashMap;

use rmcp::model::NumberOrString;

use crate::call::RequestId;

#[derive(Debug, Default)]
pub(super) struct PendingRequestsToClient {
    /// Maps each open request's id to the id of the call that made it.
    pending: HashMap<NumberOrString, RequestId>,
    /// Requests from cancelled calls. The server receives an error for each of them.
    abandoned: Vec<NumberOrString>,
}

// === impl PendingRequestsToClient ===

impl PendingRequestsToClient {
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.abandoned.is_empty()
    }

    /// Records a call's request to the client.
    pub(super) fn insert(&mut self, id: NumberOrString, origin: RequestId) {
        self.pending.insert(id, origin);
    }

    /// Removes a request that the client has answered or the server has cancelled.
    pub(super) fn remove(&mut self, id: &NumberOrString) {
        self.pending.remove(id);
    }

    /// Removes an ended call's requests.
    pub(super) fn remove_for_call(&mut self, origin: &RequestId) {
        self.pending.retain(|_, other| other != origin);
    }

    /// Abandons a cancelled call's requests.
    pub(super) fn abandon(&mut self, origin: &RequestId) {
        let abandoned = self.pending.extract_if(|_, other| other == origin);
        self.abandoned.extend(abandoned.map(|(id, _)| id));
    }

    /// Removes and returns an abandoned request.
    pub(super) fn next_abandoned(&mut self) -> Option<NumberOrString> {
        self.abandoned.pop()
    }
}
