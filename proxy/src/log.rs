//! Writes log lines to standard error, as text or as JSON.
//!
//! At level info, a line is logged each time a call's client disconnects or resumes, and each time a call is cancelled. All lines
//! about a call contain its number. Text sent by a client or a server is logged on one line, truncated and without control
//! characters.
//!
//! A dedicated thread writes the lines. If standard error is closed or full, or if it is not being read, lines are dropped and
//! counted.

use std::{
    env, fmt,
    io::{self, IsTerminal as _},
    panic,
    sync::Mutex,
    time::Duration,
};

use mcp_cancel_on_disconnect::{
    Event, Outcome,
    observe::{ParseFailure, SessionIds},
};
use tracing::{Subscriber, error, field::debug, info, level_filters::LevelFilter, warn};
#[cfg(feature = "otel")]
use tracing_subscriber::filter::{FilterExt as _, filter_fn};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Writer},
    },
    layer::SubscriberExt as _,
    registry,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use self::queue::Queue;
#[cfg(feature = "otel")]
use crate::traces::{TARGET, Traces};
use crate::{config::LogFormat, lock::lock, message::sanitize};

mod queue;

/// The default filter. `RUST_LOG` adds to it, or replaces it if it sets a level for all targets.
///
/// `mcp_server` is a command's stderr. The layer's setup hints are off, because they are about Rust code and of no help to the
/// program's users.
const DEFAULT: &str = "warn,mcp_cancel_proxy=info,mcp_cancel_on_disconnect=info,mcp_cancel_on_disconnect::setup=off,mcp_server=info";

/// Maximum number of bytes to log of a name sent by a client.
const MAX_NAME: usize = 128;

/// Maximum number of bytes to log of a panic message.
const MAX_PANIC: usize = 1024;

/// How long writing the last lines may take.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(200);

/// The target for a command's stderr.
const SERVER_TARGET: &str = "mcp_server";

/// The text format. Only the lines written by a command show their target.
struct Lines {
    proxy: Format,
    server: Format,
}

/// This process's log.
#[derive(Debug)]
#[must_use]
pub struct Log {
    queue: Queue,
    #[cfg(feature = "otel")]
    traces: Option<Traces>,
}

/// Installs this process's log.
///
/// # Errors
///
/// Returns an error of the kind `InvalidInput` if `RUST_LOG` can't be parsed, and one of any other kind if the writer thread or
/// the trace export can't be started.
pub fn init(format: LogFormat) -> io::Result<Log> {
    let from_env = env::var_os(EnvFilter::DEFAULT_ENV).filter(|text| !text.is_empty());
    let filter = match from_env {
        Some(text) => {
            EnvFilter::try_new(prepend_default(&text.to_string_lossy())).map_err(|error| {
                let text = format!("environment variable RUST_LOG: {error}");
                io::Error::new(io::ErrorKind::InvalidInput, text)
            })?
        }
        None => EnvFilter::new(DEFAULT),
    };
    let queue = Queue::start(io::stderr(), |lines| {
        warn!(
            lines,
            "log lines dropped: standard error was closed, full or not read"
        );
    })?;
    #[cfg(feature = "otel")]
    let traces = Traces::start()?;
    #[cfg(feature = "otel")]
    let log = registry()
        .with(
            lines(format, queue.clone())
                .with_filter(filter.and(filter_fn(|metadata| metadata.target() != TARGET))),
        )
        .with(traces.as_ref().map(Traces::layer));
    #[cfg(not(feature = "otel"))]
    let log = registry().with(filter).with(lines(format, queue.clone()));
    log.init();
    // The default hook might block on standard error.
    panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        error!(
            "internal error, please report it: {}",
            sanitize(text.as_bytes(), MAX_PANIC)
        );
    }));
    Ok(Log {
        queue,
        #[cfg(feature = "otel")]
        traces,
    })
}

/// Returns the layer that writes lines to a queue.
fn lines<S>(format: LogFormat, queue: Queue) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer()
        // Internal errors would be printed with `eprintln!`, which panics if it can't write to standard error.
        .log_internal_errors(false)
        .with_writer(move || queue.clone());
    match format {
        LogFormat::Text => layer
            .with_ansi(io::stderr().is_terminal())
            .event_format(Lines {
                proxy: Format::default().with_target(false),
                server: Format::default(),
            })
            .boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    }
}

/// Prepends the default filter, unless `filter` sets a level for all targets.
fn prepend_default(filter: &str) -> String {
    let is_for_all = |part: &str| {
        let part = part.trim();
        !part.is_empty() && part.parse::<LevelFilter>().is_ok()
    };
    if filter.split(',').any(is_for_all) {
        filter.to_owned()
    } else {
        format!("{DEFAULT},{filter}")
    }
}

/// Returns the number of dropped lines.
#[must_use]
pub fn dropped() -> u64 {
    queue::dropped()
}

// === impl Log ===

impl Log {
    /// Sends the last traces, for up to 500 ms, and then writes the last lines, for up to 200 ms.
    pub fn end(self) {
        #[cfg(feature = "otel")]
        if let Some(traces) = self.traces {
            traces.end();
        }
        self.queue.flush(FLUSH_TIMEOUT);
    }
}

/// Returns an observer that logs what the layer itself only logs below level info.
///
/// It logs when a client disconnects or resumes, when a call completes while its client is away, and when a request can't be
/// parsed. `kept_for` is how long the answer to a call in a session is stored for its client, or `None` if it is not stored.
pub(crate) fn log_client_events(kept_for: Option<Duration>) -> impl Fn(&Event<'_>) + Send + Sync {
    // These are the fields in the layer's own lines.
    macro_rules! log_call {
        ($call:ident, $($rest:tt)+) => {
            info!(
                call = %$call.id(),
                jsonrpc.request.id = sanitize_name(&$call.request_id().to_string()),
                mcp.method.name = sanitize_name($call.method()),
                gen_ai.tool.name = $call.tool().map(sanitize_name),
                mcp.session.id = $call.session().and_then(|id| SessionIds::Hashed.display(id)).as_deref(),
                $($rest)+
            )
        };
    }
    let logged = Mutex::new(Vec::new());
    move |event| match event {
        Event::Detached {
            call, cause, grace, ..
        } if grace.is_none_or(|grace| !grace.is_zero()) => {
            let cause = cause.to_string();
            match grace {
                Some(grace) => {
                    log_call!(
                        call,
                        cause,
                        ?grace,
                        "client disconnected, call is waiting for it to resume (--grace, --tool-grace)"
                    );
                }
                None => log_call!(
                    call,
                    cause,
                    "client disconnected, call keeps running (--grace, --tool-grace, --exempt)"
                ),
            }
        }
        Event::UnparsedBody { reason, .. } => {
            let Some(what) = describe_unparsed(*reason) else {
                return;
            };
            // Log each reason only once, because a client might send many such requests.
            let is_first = {
                let mut logged = lock(&logged);
                let is_first = !logged.contains(reason);
                if is_first {
                    logged.push(*reason);
                }
                is_first
            };
            if is_first {
                warn!("{what}: a disconnect does not cancel such requests (logged once)");
            }
        }
        Event::Resumed {
            call, detachment, ..
        } => {
            let away = detachment.map(|detachment| debug(detachment.lasted()));
            log_call!(call, away, "client resumed");
        }
        Event::Ended {
            call,
            outcome: Outcome::Completed,
            detachment: Some(detachment),
            ..
        } => {
            let away = detachment.lasted();
            match kept_for.filter(|_| call.session().is_some()) {
                Some(kept_for) => {
                    log_call!(
                        call,
                        ?away,
                        ?kept_for,
                        "call completed, answer is kept for its client (--buffer)"
                    );
                }
                None => log_call!(call, ?away, "call completed while its client was away"),
            }
        }
        _ => {}
    }
}

/// Describes a request that the layer can't parse, but that a server might accept as a call.
///
/// Returns `None` for any other request.
fn describe_unparsed(reason: ParseFailure) -> Option<&'static str> {
    Some(match reason {
        ParseFailure::BadId => "a request id is neither a string nor a 64-bit integer",
        ParseFailure::EscapedKey => "a request has an escaped member name",
        ParseFailure::DuplicateKey => "a request has a duplicate member",
        ParseFailure::WrongType => "a request's params are not an object",
        ParseFailure::NotAMessage => "a request is not a JSON-RPC 2.0 message",
        ParseFailure::TooDeep => "a request is nested too deeply",
        ParseFailure::Batch => "a request is a batch",
        ParseFailure::ContentEncoding => "a request is compressed",
        _ => return None,
    })
}

fn sanitize_name(text: &str) -> String {
    sanitize(text.as_bytes(), MAX_NAME)
}

// === impl Lines ===

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        if event.metadata().target() == SERVER_TARGET {
            self.server.format_event(context, writer, event)
        } else {
            self.proxy.format_event(context, writer, event)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_with_a_level_for_all_targets_replaces_the_default() {
        for filter in ["debug", "off,mcp_server=info", "hyper=debug, WARN"] {
            assert_eq!(prepend_default(filter), filter);
        }
        for filter in ["hyper=debug", "verbose", "mcp_cancel_proxy=error,"] {
            assert_eq!(prepend_default(filter), format!("{DEFAULT},{filter}"));
        }
    }
}
