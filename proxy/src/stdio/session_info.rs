//! Lists a command's sessions for operators.

use std::time::Duration;

use tokio::time::Instant;

use super::service::Stdio;

/// One of a command's sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// A hash of the session id, the same as in the log. The id itself is a secret.
    pub id: String,
    /// How long ago the session started.
    pub age: Duration,
    /// How long the session has had no request, call or stream, or `None` if it is in use.
    pub unused: Option<Duration>,
}

// === impl Stdio ===

impl Stdio {
    /// Returns the sessions, oldest first.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        // Release this lock first, because each session has its own lock.
        let sessions: Vec<_> = self.0.live().sessions.values().cloned().collect();
        let now = Instant::now();
        let infos = sessions.iter().map(|session| SessionInfo {
            id: session.log_id.to_string(),
            age: now.saturating_duration_since(session.started_at),
            unused: session
                .unused_since()
                .map(|since| now.saturating_duration_since(since)),
        });
        let mut infos: Vec<SessionInfo> = infos.collect();
        infos.sort_by_key(|info| std::cmp::Reverse(info.age));
        infos
    }
}
