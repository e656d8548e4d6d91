//! Log lines of what a process writes besides its messages: not too many, and not too long.

use std::{fmt, sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::observe::SessionIds;

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    time::Instant,
};
use tracing::{debug, info, warn};

use super::lines::{Line, Lines};
use crate::message::shown;

/// How many lines of one process are logged in a [`PERIOD`]: 100.
const LINES: u32 = 100;

const PERIOD: Duration = Duration::from_secs(1);

/// The longest line of stderr that is logged whole: 4 KiB.
const LONGEST: usize = 4 * 1024;

/// How much of a line is logged that is no message.
const BEGINNING: usize = 200;

/// A session in the log, as the layer logs it. Its id must not stand there: a client that knows the id can use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name(Arc<str>);

/// Allows so many lines in a period, and counts the others.
#[derive(Debug, Default)]
pub(super) struct Rate {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

// === impl Name ===

impl Name {
    /// The same for the same id, in this process only.
    pub(super) fn of(id: &str) -> Self {
        Self(SessionIds::Hashed.display(id).unwrap_or_default().into())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl Rate ===

impl Rate {
    /// Whether one more line may be logged, and how many were left out before it.
    pub(super) fn allows(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + PERIOD) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines >= LINES {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }

    /// Logs a line that is no message, if it may.
    pub(super) fn unreadable(&mut self, session: &Name, why: &str, line: &[u8]) {
        if let Some(left_out) = self.allows(Instant::now()) {
            let beginning = shown(line, BEGINNING);
            let left_out = (left_out > 0).then_some(left_out);
            warn!(mcp.session.id = %session, left_out, "the MCP server wrote {why} to its stdout: {beginning}");
        }
    }
}

/// Logs the lines of a stderr until its end.
pub(super) async fn stderr(session: Name, mut from: impl AsyncRead + Unpin) {
    let (mut lines, mut rate) = (Lines::new(LONGEST), Rate::default());
    loop {
        let read = from.read_buf(lines.buffer()).await;
        while let Some(line) = lines.next_line() {
            said(&session, &mut rate, &line);
        }
        if !matches!(read, Ok(1..)) {
            if let Some(line) = lines.last_line() {
                said(&session, &mut rate, &line);
            }
            return debug!(mcp.session.id = %session, "the MCP server's stderr has ended");
        }
    }
}

fn said(session: &Name, rate: &mut Rate, line: &Line) {
    if let Some(left_out) = rate.allows(Instant::now()) {
        let (text, cut) = match line {
            Line::Whole(text) => (text, None),
            Line::TooLong { beginning, .. } => (beginning, Some(true)),
        };
        let left_out = (left_out > 0).then_some(left_out);
        let text = shown(text, LONGEST);
        info!(target: "mcp_server", left_out, cut, mcp.session.id = %session, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_not_logged() {
        let (mut rate, now) = (Rate::default(), Instant::now());
        let allowed = (0..1_000).filter_map(|_| rate.allows(now));
        assert_eq!(allowed.collect::<Vec<_>>(), [0; LINES as usize]);
        assert_eq!(rate.allows(now + PERIOD), Some(900));
        assert_eq!(rate.allows(now + PERIOD), Some(0));
    }

    #[test]
    fn the_name_of_a_session_does_not_tell_its_id() {
        assert_eq!(Name::of("abc"), Name::of("abc"));
        assert_ne!(Name::of("abc"), Name::of("abd"));
        assert_eq!(Name::of("abc").to_string().len(), 8);
    }
}
