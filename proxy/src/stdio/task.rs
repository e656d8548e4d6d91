//! A session's task. It owns the process, reads the process's output, and enforces deadlines.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::future::{join, maybe_done};
use rustix::process::Signal;
use tokio::{
    io::AsyncReadExt as _,
    process::ChildStdout,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    input::InputWriter,
    lines::{Line, Lines},
    process::{Group, Pipes, exit_text},
    routing::Route,
    session::{EndReason, Session, State},
    stderr_log::{self, LineRateLimit},
    stop::{ProcessEnd, STOP_TIMEOUT, SessionEnd, stop_process, then_pending},
};
use crate::{
    event_store::{Event, Stream},
    message::{IdKey, Kind, Message, Scanner, batch, single_line},
    refusal::SERVER_ERROR,
};

/// How long to keep reading output after the process group has been killed.
///
/// There has to be a limit, because a process outside the group might still have the pipes open.
const PIPE_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a session may be unused after `initialize`.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);

/// Minimum time that a process must be blocked for this to be recorded. Shorter waits are ignored.
const MIN_BLOCKED: Duration = Duration::from_millis(1);

/// How often a session is checked while its process is blocked.
const BLOCKED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How late a check must be to count as a sign that the proxy has stalled.
///
/// The proxy stalls, for example, while it is suspended.
const MIN_STALL: Duration = Duration::from_millis(100);

/// How often a session with a cancelled call is checked.
///
/// If the proxy stalls, only the time after the next check was due is recognised as a stall, so checks have to be frequent.
const CANCELLED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The error for a call whose answer is still waiting for room when the session ends.
const ANSWER_NOT_READ: &str = "the session ended before its client had read the answer";

const UNREADABLE: &str = "the MCP server's answer is not JSON in UTF-8";

const TOO_LONG: &str =
    "the MCP server's answer is larger than 16 MiB, the longest line that the proxy accepts";

/// The stream of a call being answered, which therefore no longer has a route.
///
/// Dropping this ends the stream, with an error if the answer has not been added.
struct EndOnDrop<'a>(&'a Stream);

// === impl Session ===

impl Session {
    /// Runs the session until it ends. The process group has been killed by the time this returns.
    pub(super) async fn run(
        &self,
        mut group: Group,
        pipes: Pipes,
        input_writer: InputWriter,
    ) -> SessionEnd {
        let session = &self.log_id;
        info!(mcp.session.id = %session, pid = group.pid(), "session started");
        let mut reading = pin!(maybe_done(self.read_output(pipes.stdout)));
        let mut logging = pin!(maybe_done(stderr_log::log_stderr(
            session.clone(),
            pipes.stderr
        )));
        let reason = {
            // Dropping this future closes stdin.
            let writing = input_writer.write(pipes.stdin, &self.backpressure);
            let mut logging = pin!(then_pending(logging.as_mut()));
            tokio::select! {
                // Poll `writing` before `stop`, so that queued messages, such as a cancellation, are still written before stdin is
                // closed, as far as the pipe has room for them.
                biased;
                () = group.wait_for_exit() => EndReason::Exited,
                stopped = writing => EndReason::from(stopped),
                () = self.stop.notified() => self.state().stopped.unwrap_or(EndReason::Deleted),
                () = reading.as_mut() => EndReason::Closed,
                reason = self.enforce_deadlines() => reason,
                never = logging.as_mut() => match never {},
            }
        };
        let process_end = {
            let output = maybe_done(join(reading.as_mut(), logging.as_mut()));
            stop_process(&mut group, reason, pin!(output)).await
        };
        // Kill any descendants that are left, because they may still have the pipes open.
        group.signal(Signal::KILL);
        let _ = timeout(PIPE_DRAIN_TIMEOUT, join(reading, logging)).await;
        let status = match timeout(STOP_TIMEOUT, group.reap()).await {
            Ok(Ok(status)) => exit_text(status),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the process did not exit".into(),
        };
        let failed_to_start = {
            let state = self.state();
            state.stopped.is_none() && !state.has_answered
        };
        let reason = match (reason, process_end) {
            // A process's pipes close shortly before the process exits.
            (EndReason::Closed, ProcessEnd::Exited) => EndReason::Exited,
            _ => reason,
        };
        let text = match reason {
            EndReason::Exited => format!("the MCP server has exited ({status})"),
            reason => format!("{} ({status})", reason.text()),
        };
        self.finish(reason, &text);
        let text = match reason {
            EndReason::Idle if self.state().was_used => {
                format!("idle for {:?} (--session-timeout)", self.timeouts.idle)
            }
            EndReason::Lost => {
                format!(
                    "its client was disconnected for {:?} (--lost-timeout)",
                    self.timeouts.lost
                )
            }
            EndReason::Idle => format!("unused for {UNUSED_TIMEOUT:?} after initialize"),
            EndReason::Evicted => format!("{text} (--max-sessions)"),
            EndReason::Overdue => format!("{text} (--kill-after)"),
            _ => text,
        };
        match reason {
            EndReason::Deleted
            | EndReason::Idle
            | EndReason::Lost
            | EndReason::Evicted
            | EndReason::Shutdown(_) => {
                info!(mcp.session.id = %session, "session ended: {text}")
            }
            _ => warn!(mcp.session.id = %session, "session ended: {text}"),
        }
        let was_killed = process_end == ProcessEnd::Killed;
        SessionEnd {
            reason,
            failed_to_start,
            was_killed,
        }
    }

    /// Reads the server's output until it ends.
    async fn read_output(&self, mut stdout: ChildStdout) {
        let (mut lines, mut rate) = (Lines::default(), LineRateLimit::default());
        loop {
            let read = stdout.read_buf(lines.buffer()).await;
            while let Some(line) = lines.next_line() {
                self.handle_line(line, &mut rate).await;
            }
            if !matches!(read, Ok(1..)) {
                if let Some(line) = lines.last_line() {
                    self.handle_line(line, &mut rate).await;
                }
                return;
            }
        }
    }

    /// Handles a line, which is a message, a batch, or text to log. May wait for a client to read.
    async fn handle_line(&self, line: Line, rate: &mut LineRateLimit) {
        let text = match line {
            Line::Whole(text) => single_line(text),
            Line::TooLong { prefix, answers } => {
                rate.log_unparsed(&self.log_id, "an overlong line", &prefix);
                if let Some(call) = answers {
                    self.on_answer_lost(&call, TOO_LONG);
                }
                return;
            }
        };
        let messages = batch(&text).map(|messages| {
            let messages = messages.into_iter();
            messages
                .map(|message| text.slice_ref(message))
                .collect::<Vec<_>>()
        });
        let Some(messages) = messages else {
            return self.handle_message(text, rate).await;
        };
        drop(text);
        for message in messages {
            self.handle_message(message, rate).await;
        }
    }

    /// Handles one message.
    ///
    /// A batch's messages are handled one by one, because they may belong to different calls. JSON without a version is not
    /// treated as a message, because some servers write log lines in JSON to stdout, with members such as `id` and `error`.
    async fn handle_message(&self, text: Bytes, rate: &mut LineRateLimit) {
        let message = str::from_utf8(&text)
            .ok()
            .and_then(|text| Message::read(text.as_bytes()))
            .filter(|message| message.has_version);
        let Some(message) = message else {
            rate.log_unparsed(&self.log_id, "a line that is not a message", &text);
            if let Some(call) = Scanner::of(&text).answers_with_version() {
                self.on_answer_lost(&call, UNREADABLE);
            }
            return;
        };
        let is_progress = message.method.as_deref() == Some("notifications/progress");
        let route = {
            let mut state = self.state();
            state.has_answered |= message.kind == Kind::Response;
            match state.routes.route(&message) {
                Route::Standalone
                    if message.kind == Kind::Request && !self.standalone.is_attached() =>
                {
                    // Use a stream that a client is reading, so that the request can be answered.
                    let newest = state.routes.newest(Stream::is_attached);
                    newest.map_or(Route::Standalone, Route::Call)
                }
                route => route,
            }
        };
        let (stream, is_answer) = match &route {
            Route::Answer(stream) => (stream, true),
            // The message does not refer to a call, and the client has disconnected from the open call's stream. Use the
            // standalone stream if the client is reading that, or if it can't resume the call's.
            Route::Call(stream)
                if !is_progress
                    && stream.lost_all_readers()
                    && (self.standalone.is_attached() || !stream.has_events()) =>
            {
                (&self.standalone, false)
            }
            Route::Call(stream) => (stream, false),
            Route::Standalone => (&self.standalone, false),
            Route::Dropped => {
                return debug!(mcp.session.id = %self.log_id, "dropped a message from the MCP server that belongs to no open call");
            }
        };
        let _end = is_answer.then(|| EndOnDrop(stream));
        let event = Event::message(&text, stream.call());
        // Keep only one copy of the text, because the event may have to wait for room for a long time.
        drop(text);
        // If the event store refuses an event, it logs that and ends the event's call on its own.
        let before = Instant::now();
        let _ = self.backpressure.wait(stream.push(event)).await;
        self.add_blocked_time(before.elapsed());
        if is_answer {
            stream.end();
            self.state().last_used = Instant::now();
        }
    }

    /// Records how long the process was blocked.
    fn add_blocked_time(&self, blocked: Duration) {
        if blocked < MIN_BLOCKED {
            return;
        }
        self.state()
            .routes
            .add_blocked_time(Instant::now(), blocked);
        self.changed.notify_one();
    }

    /// Ends a call with an error, because its answer can't be forwarded.
    ///
    /// If there is no call with this id, only records that the server has answered.
    fn on_answer_lost(&self, call: &IdKey, reason: &str) {
        let route = {
            let mut state = self.state();
            (state.has_answered, state.last_used) = (true, Instant::now());
            state.routes.on_answered(call)
        };
        if let Route::Answer(stream) = route {
            stream.replace_answer(SERVER_ERROR, reason);
        }
    }

    /// Enforces the calls' and the session's deadlines, and returns why the session has to end.
    async fn enforce_deadlines(&self) -> EndReason {
        loop {
            let next = {
                let mut state = self.state();
                let now = Instant::now();
                let is_blocked = self.backpressure.is_on();
                let due = state.routes.due(now, is_blocked);
                let (idle, reason) = self.idle_at(&mut state, now);
                // Check several times within the lost timeout, because the client may disconnect at any time.
                let next = idle.min(now + self.timeouts.lost / 4 + Duration::from_millis(1));
                let next = state.routes.next_due().map_or(next, |due| {
                    due.min(next).min(now + CANCELLED_CHECK_INTERVAL)
                });
                let next = if is_blocked {
                    // No call is overdue while the process is blocked.
                    next.max(now + BLOCKED_CHECK_INTERVAL)
                } else {
                    next
                };
                let end_reason = if due.overdue {
                    Some(EndReason::Overdue)
                } else {
                    (idle <= now).then_some(reason)
                };
                let mut remaining = Vec::new();
                if end_reason == Some(reason) {
                    // Calls are started under the same lock, so none can have started since `idle_at`.
                    state.stopped.get_or_insert(reason);
                    remaining = state.routes.end();
                }
                drop(state);
                for stream in due.closed {
                    stream.end_cancelled();
                }
                if let Some(reason) = end_reason {
                    // These streams belong to cancelled calls, or to an `initialize` whose client has disconnected.
                    for stream in remaining {
                        stream.end_with_error(SERVER_ERROR, reason.text());
                    }
                    return reason;
                }
                next
            };
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.changed.notified() => {}
            }
            self.exclude_stall(next);
        }
    }

    /// If the check due at `due` is late, excludes the stall from all timeouts.
    ///
    /// Requests that arrived during the stall have not been read yet, so the session's timeouts restart. The process may have
    /// stalled as well, so cancelled calls get as much more time as the check is late.
    fn exclude_stall(&self, due: Instant) {
        let now = Instant::now();
        let lateness = now.saturating_duration_since(due);
        if lateness >= MIN_STALL {
            let mut state = self.state();
            state.last_used = now;
            state.routes.add_blocked_time(now, lateness);
        }
    }

    /// Returns when the session will have been unused for too long, and the reason for ending it.
    ///
    /// If the session is in use, also updates the time of its last use.
    fn idle_at(&self, state: &mut State, now: Instant) -> (Instant, EndReason) {
        let timeout = if state.was_used {
            self.timeouts.idle
        } else {
            self.timeouts.idle.min(UNUSED_TIMEOUT)
        };
        let (timeout, reason) = if self.timeouts.lost < timeout && self.is_lost(state) {
            (self.timeouts.lost, EndReason::Lost)
        } else {
            (timeout, EndReason::Idle)
        };
        if self.is_working(state) || self.standalone.is_attached() {
            // Check again after a quarter of the timeout. That way, the session ends between three quarters of the timeout and
            // the full timeout after this use ended.
            state.last_used = now.max(state.last_used);
            return (now + timeout / 4 + Duration::from_millis(1), reason);
        }
        (state.last_used + timeout, reason)
    }
}

// === impl EndOnDrop ===

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        // This adds no error to a stream that has been answered or has already ended.
        self.0.end_with_error(SERVER_ERROR, ANSWER_NOT_READ);
    }
}
