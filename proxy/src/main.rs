//! Puts [`mcp_cancel_on_disconnect`] in front of any MCP server.

use std::{
    ffi::OsString,
    fmt,
    io::{self, Write as _},
    process::ExitCode,
    sync::mpsc,
    thread,
    time::Duration,
};

use mcp_cancel_proxy::{
    Proxy,
    config::{Config, ConfigError},
    drain::Signals,
    log, subcommand,
};
use tokio::runtime::Runtime;

#[path = "../demo/mod.rs"]
mod demo;

/// The exit code for configuration errors.
const USAGE: u8 = 2;

/// How long printing an error to standard error may take.
const PRINT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the runtime may take to drop its tasks, which kills the session processes.
///
/// A blocking name lookup can't be aborted, so this is also the longest the program waits for a lookup before it exits.
const RUNTIME_TIMEOUT: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(format_args!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(run());
    runtime.shutdown_timeout(RUNTIME_TIMEOUT);
    code
}

async fn run() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    if let Some(code) = demo::run_if_requested(args.iter().skip(1).cloned()).await {
        return code;
    }
    if let Some(result) = subcommand::run_if_requested(&args).await {
        return result.unwrap_or_else(report);
    }
    let config = match Config::read(args) {
        Ok(config) => config,
        Err(error) => return report(error),
    };
    let log = match log::init(config.log_format) {
        Ok(log) => log,
        Err(error) => {
            print_error(format_args!("error: {error}"));
            return if error.kind() == io::ErrorKind::InvalidInput {
                ExitCode::from(USAGE)
            } else {
                ExitCode::FAILURE
            };
        }
    };
    let served = async {
        let signals = Signals::listen()?;
        let drain = config.drain;
        let proxy = Proxy::bind(config).await?;
        signals.serve(drain, |stop| proxy.serve(stop)).await;
        Ok::<_, mcp_cancel_proxy::StartError>(())
    };
    let served = served.await;
    log.end();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(format_args!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Reports a configuration error, or prints the help or the version.
///
/// For a command-line error, the help or the version, this exits the process right away.
fn report(error: ConfigError) -> ExitCode {
    if let ConfigError::Options(error) = error {
        error.exit();
    }
    print_error(error);
    ExitCode::from(USAGE)
}

/// Writes a line to standard error, giving up after [`PRINT_TIMEOUT`] if the pipe is full.
fn print_error(line: impl fmt::Display) {
    let line = line.to_string();
    let (done, written) = mpsc::channel();
    thread::spawn(move || done.send(writeln!(io::stderr(), "{line}")));
    let _ = written.recv_timeout(PRINT_TIMEOUT);
}
