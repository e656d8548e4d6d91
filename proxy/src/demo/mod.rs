//! What the program does that is no part of a proxy: the server that it has for itself.

use std::{ffi::OsString, process::ExitCode};

pub mod server;

/// Does what is asked for in place of a proxy, if anything is.
pub async fn instead(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let first = arguments.next()?;
    match first.to_str() {
        Some(server::COMMAND) => Some(server::run(arguments)),
        _ => None,
    }
}
