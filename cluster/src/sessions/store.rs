//! Implements rmcp's session store on top of the directory.
//!
//! 1. A new session that has not been written to the directory within [`OPEN_TIMEOUT`] is not started ([`Sessions::admit_new_session`]). An
//!    ended session's tombstone is written as soon as the directory answers.
//! 2. Only a session's owner restores it. The owner has to claim the session first, and in the meantime the restore is pending.
//! 3. Neither errors nor log lines contain session ids.

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

/// Maximum length of a session's parameters, as JSON.
///
/// Clients can still reach a session with longer parameters, but it is not restored after its instance dies.
const MAX_PARAMS: usize = 64 * 1024;

/// How long a new session waits for its record to be written.
///
/// This is long enough for two attempts of [`DIRECTORY_TIMEOUT`] each.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Uses the directory to store what is needed to restore a session.
#[derive(Debug)]
pub(crate) struct ClusterStore {
    this_instance: Incarnation,
    directory: Limited,
    sessions: Arc<Sessions>,
    too_large_warning: RateLimitedWarning,
}

// === impl ClusterStore ===

impl ClusterStore {
    pub(crate) fn new(
        this_instance: Incarnation,
        directory: Limited,
        sessions: Arc<Sessions>,
    ) -> Self {
        Self {
            this_instance,
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
        // Check again, because the session may have been deleted while it was being loaded.
        if self.sessions.is_deleted(session) {
            return Ok(None);
        }
        if entry.ownership.owner.incarnation != self.this_instance {
            return Err(io::Error::other("another instance owns the session").into());
        }
        // Parameters that are too large are never stored, so the session cannot be restored.
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
            let message = "a session's parameters are too large to be stored, so the session will end with this instance";
            self.too_large_warning.warn(&format_args!(
                "{message} ({} bytes, {MAX_PARAMS} at most)",
                params.len()
            ));
            params.clear();
        }
        self.sessions.on_initialized(session_id, params.into());
        let written = self
            .sessions
            .wait_until_written(SessionHash::of(session_id));
        if timeout(OPEN_TIMEOUT, written).await.is_err() {
            tracing::debug!("the directory does not have a new session yet");
        }
        Ok(())
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        self.sessions.on_deleted(session_id);
        let removed = self
            .sessions
            .wait_until_removed(SessionHash::of(session_id));
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
