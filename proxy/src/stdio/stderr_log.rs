//! Logs whatever a process writes besides messages, limited in rate and length.

use std::{fmt, sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::observe::SessionIds;

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    time::Instant,
};
use tracing::{debug, info, warn};

use super::lines::{Line, Lines};
use crate::message::sanitize;

/// Maximum number of lines to log per output stream in each [`PERIOD`].
const MAX_LINES: u32 = 100;

/// The rate limit's period.
const PERIOD: Duration = Duration::from_secs(1);

/// Maximum length of a stderr line to log in full.
const MAX_LINE_BYTES: usize = 4 * 1024;

/// Maximum number of bytes to log of a stdout line that is not a message.
const MAX_EXCERPT: usize = 200;

/// Identifies a session in the log, in the same way the layer does.
///
/// This is not the session id itself, which is a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SessionLogId(Arc<str>);

/// Admits up to [`MAX_LINES`] lines per [`PERIOD`], and counts the lines it omits.
#[derive(Debug, Default)]
pub(super) struct LineRateLimit {
    period_start: Option<Instant>,
    lines: u32,
    omitted: u64,
}

// === impl SessionLogId ===

impl SessionLogId {
    /// Hashes a session id. The hash is only stable within this process.
    pub(super) fn new(id: &str) -> Self {
        Self(SessionIds::Hashed.display(id).unwrap_or_default().into())
    }
}

impl fmt::Display for SessionLogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl LineRateLimit ===

impl LineRateLimit {
    /// Admits a line and returns how many lines were omitted just before it.
    ///
    /// Returns `None` if this line must be omitted too.
    pub(super) fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.period_start.is_none_or(|start| now >= start + PERIOD) {
            self.period_start = Some(now);
            self.lines = 0;
        }
        if self.lines >= MAX_LINES {
            self.omitted += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.omitted))
    }

    /// Logs a line that is not a message, unless the rate limit has been exceeded.
    pub(super) fn log_unparsed(&mut self, session: &SessionLogId, kind: &str, line: &[u8]) {
        if let Some(omitted) = self.admit(Instant::now()) {
            let excerpt = sanitize(line, MAX_EXCERPT);
            let omitted = (omitted > 0).then_some(omitted);
            warn!(mcp.session.id = %session, omitted, "the MCP server wrote {kind} to its stdout: {excerpt}");
        }
    }
}

/// Logs lines from stderr until it is closed or can't be read.
pub(super) async fn log_stderr(session: SessionLogId, mut from: impl AsyncRead + Unpin) {
    let (mut lines, mut rate) = (Lines::new(MAX_LINE_BYTES), LineRateLimit::default());
    loop {
        let read = from.read_buf(lines.buffer()).await;
        while let Some(line) = lines.next_line() {
            log_line(&session, &mut rate, &line);
        }
        if !matches!(read, Ok(1..)) {
            if let Some(line) = lines.last_line() {
                log_line(&session, &mut rate, &line);
            }
            return debug!(mcp.session.id = %session, "stopped reading the MCP server's stderr");
        }
    }
}

fn log_line(session: &SessionLogId, rate: &mut LineRateLimit, line: &Line) {
    if let Some(omitted) = rate.admit(Instant::now()) {
        let (text, truncated) = match line {
            Line::Whole(text) => (text, None),
            Line::TooLong { prefix, .. } => (prefix, Some(true)),
        };
        let omitted = (omitted > 0).then_some(omitted);
        let text = sanitize(text, MAX_LINE_BYTES);
        info!(target: "mcp_server", omitted, truncated, mcp.session.id = %session, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_not_logged() {
        let (mut rate, now) = (LineRateLimit::default(), Instant::now());
        let allowed = (0..1_000).filter_map(|_| rate.admit(now));
        assert_eq!(allowed.collect::<Vec<_>>(), [0; MAX_LINES as usize]);
        assert_eq!(rate.admit(now + PERIOD), Some(900));
        assert_eq!(rate.admit(now + PERIOD), Some(0));
    }

    #[test]
    fn the_log_id_of_a_session_is_a_short_stable_hash() {
        assert_eq!(SessionLogId::new("abc"), SessionLogId::new("abc"));
        assert_ne!(SessionLogId::new("abc"), SessionLogId::new("abd"));
        assert_eq!(SessionLogId::new("abc").to_string().len(), 8);
    }
}
