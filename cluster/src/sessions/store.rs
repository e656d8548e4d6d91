//! rmcp's session store, in the directory: the data to restore a session on another instance.
//!
//! 1. A session that is not in the directory within [`OPEN_TIMEOUT`] does not start ([`Sessions::admit_new_session`]). The tombstone of an
//!    ended session is written as soon as the directory answers.
//! 2. Only its owner restores a session. The owner must claim the session first, and meanwhile the restore is pending.
//! 3. Errors and log lines contain no session id.

use std::{io, sync::Arc, time::Duration};

use async_trait::async_trait;
use rmcp::transport::streamable_http_server::session::{
    SessionState, SessionStore, SessionStoreError,
};
use tokio::time::timeout;

use crate::{
    directory::{DIRECTORY_TIMEOUT, Directory, Limited},
    ids::{Incarnation, SessionHash},
    rate_limited_warning::RateLimitedWarning,
    sessions::Sessions,
};

/// Maximum length of the parameters of a session, as JSON: 64 KiB.
///
/// A session with longer parameters is reachable by its clients, but is not restored after its instance has died.
const MAX_PARAMS: usize = 64 * 1024;

/// Maximum wait of a new session for its record: 2 s.
///
/// Chosen to allow for two attempts, each with [`DIRECTORY_TIMEOUT`].
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Stores in the directory what a session needs to be restored.
#[derive(Debug)]
pub(crate) struct ClusterStore {
    me: Incarnation,
    directory: Limited,
    sessions: Arc<Sessions>,
    too_large_warning: RateLimitedWarning,
}

// === impl ClusterStore ===

impl ClusterStore {
    pub(crate) fn new(me: Incarnation, directory: Limited, sessions: Arc<Sessions>) -> Self {
        Self {
            me,
            directory,
            sessions,
            too_large_warning: RateLimitedWarning::default(),
        }
    }
}

#[async_trait]
impl SessionStore for ClusterStore {
    async fn load(&self, session_id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        let session = SessionHash::of(session_id);
        if self.sessions.is_deleted(session) {
            return Ok(None);
        }
        let load = self.sessions.restore_attempts.begin_load(session);
        let loaded = self.directory.load(session).await;
        load.complete();
        let Some(entry) = loaded? else {
            return Ok(None);
        };
        // Checked again, because the session may have been deleted during the load.
        if self.sessions.is_deleted(session) {
            return Ok(None);
        }
        if entry.ownership.owner.incarnation != self.me {
            return Err(io::Error::other("another instance owns the session").into());
        }
        if entry.params.is_empty() {
            return Ok(None);
        }
        let epoch = entry.ownership.epoch;
        self.sessions.restore_attempts.add(session, epoch);
        let state = serde_json::from_slice(&entry.params)?;
        self.sessions
            .on_loaded(session_id, epoch, Arc::from(&*entry.params));
        Ok(Some(state))
    }

    async fn store(&self, session_id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        let mut params = serde_json::to_vec(state)?;
        if params.len() > MAX_PARAMS {
            let message = "the parameters of a session are too large to be stored: the session ends with this instance";
            self.too_large_warning.warn(&format_args!(
                "{message} ({} bytes, {MAX_PARAMS} at most)",
                params.len()
            ));
            params.clear();
        }
        self.sessions.on_initialized(session_id, params.into());
        let written = self.sessions.until_written(SessionHash::of(session_id));
        if timeout(OPEN_TIMEOUT, written).await.is_err() {
            tracing::debug!("the directory does not have a new session yet");
        }
        Ok(())
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        self.sessions.on_deleted(session_id);
        let removed = self.sessions.until_removed(SessionHash::of(session_id));
        if timeout(DIRECTORY_TIMEOUT, removed).await.is_err() {
            tracing::debug!(
                "a session has ended, and the directory does not have its tombstone yet"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
