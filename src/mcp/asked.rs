//! Requests that the calls of a session made to their client, and the answers in its place.

use std::collections::HashMap;

use rmcp::model::NumberOrString;

use crate::call::RequestId;

/// The requests to the client that nobody has answered.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// By their ids, each with the call that it was made for.
    open: HashMap<NumberOrString, RequestId>,
    /// Those whose call was cancelled. The server is to be told.
    vain: Vec<NumberOrString>,
}

// === impl Asked ===

impl Asked {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.vain.is_empty()
    }

    /// Notes what a call asks the client.
    pub(super) fn ask(&mut self, id: NumberOrString, origin: RequestId) {
        self.open.insert(id, origin);
    }

    /// Forgets a request that the client has answered, or of which the server has told it that nobody waits any more.
    pub(super) fn answered(&mut self, id: &NumberOrString) {
        self.open.remove(id);
    }

    /// Forgets what a call that has ended asked.
    pub(super) fn forget(&mut self, origin: &RequestId) {
        self.open.retain(|_, other| other != origin);
    }

    /// Gives up what a cancelled call asked.
    pub(super) fn give_up(&mut self, origin: &RequestId) {
        let vain = self.open.extract_if(|_, other| other == origin);
        self.vain.extend(vain.map(|(id, _)| id));
    }

    /// Takes a request that is in vain.
    pub(super) fn next_vain(&mut self) -> Option<NumberOrString> {
        self.vain.pop()
    }
}
