//! Log lines, for people or for machines, on standard error.
//!
//! At info there is a line for each call that is abandoned, resumed or cancelled. The lines of a call have its number. What
//! comes from a client or a server is one line, without control characters, and cut.

use std::io::{self, IsTerminal as _};

use mcp_cancel_on_disconnect::{CallInfo, Event};
use tracing::info;
use tracing_subscriber::EnvFilter;

use crate::{config::LogFormat, message::shown};

/// Unless `RUST_LOG` says otherwise. `mcp_server` is what a command writes to its stderr. The layer's remarks speak to who calls
/// its methods, and not to who sets options of a program.
const DEFAULT: &str = "warn,mcp_cancel_proxy=info,mcp_cancel_on_disconnect=info,mcp_cancel_on_disconnect::remarks=off,mcp_server=info";

/// How many bytes of a name from a client are logged: 128.
const LONGEST: usize = 128;

/// Logs from now on.
pub fn init(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    match format {
        LogFormat::Text => log
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
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
