//! What is logged, and how: lines for people or for machines, on standard error.
//!
//! At info there is a line for each call that is abandoned, resumed or cancelled. The lines of a call have its number. What
//! comes from a client or a server is one line, without control characters, and cut.

use std::io::{self, IsTerminal as _};

use mcp_cancel_on_disconnect::{CallInfo, Event};
use tracing::info;
use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// Unless `RUST_LOG` says otherwise. `mcp_server` is what a command writes to its stderr.
const DEFAULT: &str = "warn,mcp_cancel_proxy=info,mcp_cancel_on_disconnect=info,mcp_server=info";

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

/// The beginning of a text on one line, without control characters.
pub(crate) fn shown(text: &[u8], longest: usize) -> String {
    let beginning = text.get(..longest).unwrap_or(text);
    let clean = |char: char| match char.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => char,
    };
    let mut shown: String = String::from_utf8_lossy(beginning)
        .chars()
        .map(clean)
        .collect();
    if beginning.len() < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_is_one_line_and_bounded() {
        assert_eq!(
            shown(b"a\x1b[31m\xff\n", 100),
            "a\u{fffd}[31m\u{fffd}\u{fffd}"
        );
        assert_eq!(shown(b"abcdef", 3), "abc…");
    }
}
