//! Writes events to the log. Cancellations are logged at the info level, because they are the layer's purpose rather than errors.
//!
//! Where OpenTelemetry's conventions (MCP, JSON-RPC, GenAI) define a name for a field, that name is used. Client-supplied text could break
//! a log line, so it passes through [`sanitize`]. Session ids are the only header values logged, and only as [`SessionIds`] allows.
//!
//! A panicking subscriber, for example one that prints to a closed stderr, does not affect any call.

use std::{
    borrow::Cow,
    hash::{BuildHasher, RandomState},
    sync::OnceLock,
    time::Duration,
};

use tracing::{debug, error, info, trace, warn};

use super::Event;
use crate::{
    call::{CallInfo, CancelReason, DetachCause, Detachment, Outcome, RequestId},
    catch_panic::catch_panic,
    limits::Limit,
};

/// Maximum number of characters of client-supplied text to log.
///
/// No reasonable id or tool name is longer, but a client can send a method name of 4 MiB.
const MAX_TEXT: usize = 128;

/// Maximum number of characters of a session id to log.
///
/// An id may be a signed token, which might differ from others only near its end and is rarely longer than this.
const MAX_SESSION_ID: usize = 4_096;

/// How session ids appear in the layer's log.
///
/// A client that knows a session id can act for the session, so ids are not logged verbatim by default.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, observe::SessionIds};
///
/// assert_eq!(SessionIds::default(), SessionIds::Hashed);
/// let layer = CancelOnDisconnectLayer::new().log_session_ids(SessionIds::Omitted);
/// # drop(layer);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SessionIds {
    /// Eight hexadecimal digits of a keyed hash. The key is random and generated once per process.
    ///
    /// They only serve to correlate a session's log lines with each other.
    #[default]
    Hashed,
    /// The plain ids, which can be correlated with client and proxy logs.
    ///
    /// An id is truncated after 4,096 characters.
    Verbatim,
    /// No ids.
    Omitted,
}

/// How a handler ended without returning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandlerEnd {
    /// It ignored its call's cancellation and was dropped.
    Stopped,
    Panicked,
}

/// Logs a line about a call.
///
/// This is a macro because `tracing` needs the level at compile time. Its arguments are only evaluated if the line is enabled.
macro_rules! log_call {
    ($level:ident, $call:expr, $sessions:expr, $($rest:tt)+) => {{
        let call: &CallInfo = $call;
        $level!(
            target: "mcp_cancel_on_disconnect",
            call = %call.id(),
            jsonrpc.request.id = &*sanitize(&call.request_id().to_string()),
            mcp.method.name = &*sanitize(call.method()),
            gen_ai.tool.name = call.tool().map(sanitize).as_deref(),
            mcp.session.id = call.session().and_then(|id| $sessions.display(id)).as_deref(),
            $($rest)+
        )
    }};
}

pub(super) fn log(event: &Event<'_>, sessions: SessionIds) {
    match event {
        Event::Started { call } => log_call!(trace, call, sessions, "call started"),
        Event::Detached { call, cause, grace } => {
            let (why, grace) = (cause.text(), *grace);
            let grace_field = grace.map(tracing::field::debug);
            match grace {
                // Its client is still connected.
                _ if *cause == DetachCause::EndedByServer => log_call!(
                    debug,
                    call,
                    sessions,
                    cause = why,
                    grace = grace_field,
                    "stream ended before the answer"
                ),
                Some(Duration::ZERO) => {
                    log_call!(debug, call, sessions, cause = why, "client disconnected");
                }
                Some(_) => log_call!(
                    debug,
                    call,
                    sessions,
                    cause = why,
                    grace = grace_field,
                    "client disconnected, waiting for resume"
                ),
                None => log_call!(
                    debug,
                    call,
                    sessions,
                    cause = why,
                    "client disconnected, call keeps running"
                ),
            }
        }
        Event::Resumed { call, detachment } => log_call!(
            debug,
            call,
            sessions,
            cause = detachment.map(cause),
            detached = detachment.map(lasted),
            "client resumed"
        ),
        Event::Ended {
            call,
            outcome,
            detachment,
        } => log_end(call, *outcome, *detachment, sessions),
        Event::CancelFailed { call, error } => log_call!(
            warn,
            call,
            sessions,
            error = &*sanitize(&error.to_string()),
            "cancel not delivered"
        ),
        Event::Untracked { call, limit } => log_call!(
            debug,
            call,
            sessions,
            limit = limit.name(),
            "call is not tracked"
        ),
        Event::AnswerEvicted {
            call,
            session,
            outcome,
            bytes,
        } => debug!(
            target: "mcp_cancel_on_disconnect",
            %call,
            mcp.session.id = sessions.display(session).as_deref(),
            ?outcome,
            bytes,
            "answer evicted",
        ),
        Event::UnparsedBody { reason } => {
            debug!(target: "mcp_cancel_on_disconnect", why = %reason, "request body not parsed");
        }
    }
}

fn log_end(
    call: &CallInfo,
    outcome: Outcome,
    detachment: Option<Detachment>,
    sessions: SessionIds,
) {
    macro_rules! log_end {
        ($level:ident, $($rest:tt)+) => {
            log_call!(
                $level,
                call,
                sessions,
                lasted = ?call.age(),
                cause = detachment.map(cause),
                detached = detachment.map(lasted),
                $($rest)+
            )
        };
    }
    match outcome {
        Outcome::Cancelled(reason) => log_end!(info, reason = reason.text(), "call cancelled"),
        Outcome::ClientCancelled => {
            let reason = CancelReason::ClientCancelled;
            log_end!(info, reason = reason.text(), "call cancelled");
        }
        Outcome::Abandoned(reason) => {
            log_end!(
                info,
                reason = reason.text(),
                "call abandoned, only the end of its stream notifies the server"
            );
        }
        Outcome::Completed => log_end!(trace, "call completed"),
        Outcome::Failed => log_end!(debug, "call failed"),
        Outcome::Unknown => log_end!(debug, "call untracked"),
    }
}

fn cause(detachment: Detachment) -> &'static str {
    detachment.cause().text()
}

fn lasted(detachment: Detachment) -> tracing::field::DebugValue<Duration> {
    tracing::field::debug(detachment.lasted())
}

/// Logs that a stream without a call has been closed because its client stopped reading it.
pub(super) fn log_stalled(session: Option<&str>, sessions: SessionIds) {
    debug!(
        target: "mcp_cancel_on_disconnect",
        cause = DetachCause::Stalled.text(),
        mcp.session.id = session.and_then(|id| sessions.display(id)).as_deref(),
        "stream closed",
    );
}

/// Logs how many calls have exceeded a limit since the last such line.
pub(crate) fn log_limit(limit: Limit, calls: u64) {
    catch_panic(|| {
        warn!(
            target: "mcp_cancel_on_disconnect",
            limit = limit.name(),
            calls,
            "limit reached: calls keep running untracked",
        );
    });
}

/// Logs how many answers have been evicted since the last such line.
pub(crate) fn log_evicted(answers: u64) {
    catch_panic(|| {
        warn!(
            target: "mcp_cancel_on_disconnect",
            answers,
            "limit of retained answers reached: answers are evicted",
        );
    });
}

/// Escapes text so that it stays on one line in any log.
///
/// Control characters, line separators, bidirectional formatting characters and combining marks are escaped. Text longer than [`MAX_TEXT`]
/// characters is truncated and ends with `…`.
fn sanitize(text: &str) -> Cow<'_, str> {
    sanitize_up_to(MAX_TEXT, text)
}

/// Like [`sanitize`], but truncates after `max` characters.
fn sanitize_up_to(max: usize, text: &str) -> Cow<'_, str> {
    let is_printable = |character: char| character == ' ' || character.is_ascii_graphic();
    if text.len() <= max && text.chars().all(is_printable) {
        return Cow::Borrowed(text);
    }
    let mut characters = text.chars();
    let mut displayed = String::new();
    for character in characters.by_ref().take(max) {
        match character {
            ' '..='~' => displayed.push(character),
            // `escape_debug` escapes invisible characters and combining marks, but hardly any letters.
            other => displayed.extend(other.escape_debug()),
        }
    }
    if characters.next().is_some() {
        displayed.push('…');
    }
    Cow::Owned(displayed)
}

// === impl HandlerEnd ===

impl HandlerEnd {
    /// Logs how the handler ended. `call` is `None` if the layer does not know the handler's call.
    pub(crate) fn log(
        self,
        call: Option<(&CallInfo, SessionIds)>,
        request: &RequestId,
        method: &str,
        tool: Option<&str>,
    ) {
        let session = call.and_then(|(call, sessions)| sessions.display(call.session()?));
        macro_rules! log_handler {
            ($level:ident, $message:literal) => {
                $level!(
                    target: "mcp_cancel_on_disconnect",
                    call = call.map(|(call, _)| tracing::field::display(call.id())),
                    jsonrpc.request.id = &*sanitize(&request.to_string()),
                    mcp.method.name = &*sanitize(method),
                    gen_ai.tool.name = tool.map(sanitize).as_deref(),
                    mcp.session.id = session.as_deref(),
                    $message
                )
            };
        }
        catch_panic(|| match self {
            Self::Stopped => log_handler!(info, "handler did not stop on its own and was dropped"),
            Self::Panicked => log_handler!(error, "handler panicked"),
        });
    }
}

// === impl SessionIds ===

impl SessionIds {
    /// Returns a session id as it appears in the log, or `None` for [`SessionIds::Omitted`].
    ///
    /// Use this string to correlate other logs, or pages about a session, with the layer's log lines. Within a process, an id always has
    /// the same hash. Every process has its own hashes, except that a forked process may inherit its parent's key.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::SessionIds;
    ///
    /// let displayed = SessionIds::Hashed.display("a session");
    /// assert_eq!(displayed, SessionIds::Hashed.display("a session"));
    /// assert_eq!(displayed.expect("a hash").len(), 8);
    /// assert_eq!(SessionIds::Omitted.display("a session"), None);
    /// ```
    #[must_use]
    pub fn display(self, id: &str) -> Option<Cow<'_, str>> {
        static LOG_KEY: OnceLock<RandomState> = OnceLock::new();
        match self {
            Self::Hashed => {
                let hash = LOG_KEY.get_or_init(RandomState::new).hash_one(id);
                Some(Cow::Owned(format!("{:08x}", hash >> 32)))
            }
            Self::Verbatim => Some(sanitize_up_to(MAX_SESSION_ID, id)),
            Self::Omitted => None,
        }
    }
}
