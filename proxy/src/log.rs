//! Log lines, for people or for machines, on standard error.
//!
//! At info there is a line for each call that is abandoned, resumed or cancelled. The lines of a call have its number. What
//! comes from a client or a server is one line, without control characters, and cut.
//!
//! A thread of its own writes the lines. Where standard error is closed, full or not read, lines are dropped and counted.

use std::{
    env,
    io::{self, IsTerminal as _},
    panic,
    sync::Once,
    time::Duration,
};

use mcp_cancel_on_disconnect::{CallInfo, Event, observe::Unreadable};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use self::queue::Queue;
use crate::{config::LogFormat, message::shown};

mod queue;

/// Unless `RUST_LOG` says otherwise. `mcp_server` is what a command writes to its stderr. The layer's remarks speak to who calls
/// its methods, and not to who sets options of a program.
const DEFAULT: &str = "warn,mcp_cancel_proxy=info,mcp_cancel_on_disconnect=info,mcp_cancel_on_disconnect::remarks=off,mcp_server=info";

/// How many bytes of a name from a client are logged: 128.
const LONGEST: usize = 128;

/// Maximum number of bytes of a panic's message that are logged: 1 KiB.
const LONGEST_PANIC: usize = 1024;

/// How long the last lines may take to be written: 200 ms.
const LAST_LINES: Duration = Duration::from_millis(200);

/// Whether it was logged that a call cannot be cancelled for its id.
static BAD_ID: Once = Once::new();

/// The log of this process.
#[derive(Debug)]
#[must_use]
pub struct Log(Queue);

/// Logs from now on.
///
/// # Errors
///
/// If `RUST_LOG` cannot be read, or if the thread that writes cannot be started.
pub fn init(format: LogFormat) -> io::Result<Log> {
    let told = env::var_os(EnvFilter::DEFAULT_ENV).filter(|text| !text.is_empty());
    let filter = match told {
        Some(text) => EnvFilter::try_new(text.to_string_lossy()).map_err(|error| {
            let text = format!("RUST_LOG in the environment: {error}");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?,
        None => EnvFilter::new(DEFAULT),
    };
    let queue = Queue::start(io::stderr(), |lines| {
        warn!(
            lines,
            "log lines were dropped: standard error was closed, full or not read"
        );
    })?;
    let writer = queue.clone();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // They are printed with `eprintln!`, which panics where standard error cannot be written.
        .log_internal_errors(false)
        .with_writer(move || writer.clone());
    match format {
        LogFormat::Text => log
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    // The default hook waits for standard error.
    panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        error!("a bug: {}", shown(text.as_bytes(), LONGEST_PANIC));
    }));
    Ok(Log(queue))
}

/// Returns the number of lines that were dropped so far.
#[must_use]
pub fn dropped() -> u64 {
    queue::dropped()
}

// === impl Log ===

impl Log {
    /// Waits until the last lines are written, for 200 ms at most.
    pub fn end(self) {
        self.0.flush(LAST_LINES);
    }
}

/// Logs what the layer itself logs at debug only: that clients go and come. Of cancels the layer writes at info.
pub(crate) fn comings_and_goings(event: &Event<'_>) {
    match event {
        Event::Detached {
            call, cause, grace, ..
        } if grace.is_none_or(|grace| !grace.is_zero()) => {
            let (tool, cause) = (tool(call), cause.to_string());
            match grace {
                Some(grace) => {
                    info!(call = %call.id(), tool, cause, ?grace, "client gone, its call waits for it")
                }
                None => info!(call = %call.id(), tool, cause, "client gone, its call runs on"),
            }
        }
        Event::Unwatched {
            why: Unreadable::BadId,
            ..
        } => {
            // A client may send many of these.
            BAD_ID.call_once(|| {
                warn!(
                    "a request has an id that is no string and no integer of 64 bits: a hang-up does not cancel it, nor any other of the kind"
                );
            });
        }
        Event::Resumed { call, .. } => {
            info!(call = %call.id(), tool = tool(call), "client is back");
        }
        _ => {}
    }
}

/// What a call is of: the tool, or else the method.
fn tool(call: &CallInfo) -> String {
    let name = call.tool().unwrap_or_else(|| call.method());
    shown(name.as_bytes(), LONGEST)
}
