//! The program itself, as a process.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::SocketAddr,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// A process running the program, which is killed on drop.
pub(crate) struct Program {
    child: Child,
    lines: BufReader<ChildStderr>,
}

// === impl Program ===

impl Program {
    /// Returns the program's command, with none of its options set by variables.
    pub(crate) fn command(args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-cancel-proxy"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MCP_PROXY_") || name == "RUST_LOG" {
                command.env_remove(name);
            }
        }
        command.args(args).stdin(Stdio::null());
        command
    }

    pub(crate) fn start(mut command: Command) -> Self {
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.expect("the program starts");
        let lines = BufReader::new(child.stderr.take().expect("a pipe"));
        Self { child, lines }
    }

    /// Runs the program until it exits, and returns its exit code and its standard error.
    pub(crate) fn run(mut command: Command) -> (Option<i32>, String) {
        let output = command.output().expect("the program starts");
        let text = String::from_utf8(output.stderr).expect("text");
        (output.status.code(), text)
    }

    /// Returns the next log line.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line
    }

    /// Returns the address in the first log line.
    pub(crate) fn addr(&mut self) -> SocketAddr {
        let line = self.line();
        let (_, rest) = line
            .split_once("listening on http://")
            .expect("the first line");
        let (addr, _) = rest.split_once('/').expect("a path");
        addr.parse().expect("an address")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("the program is running");
    }

    /// Waits for the program to exit, and returns its status and the rest of its log.
    pub(crate) async fn ended(mut self) -> (ExitStatus, String) {
        let ended = tokio::task::spawn_blocking(move || {
            let mut rest = String::new();
            self.lines.read_to_string(&mut rest).expect("text");
            (self.child.wait().expect("a status"), rest)
        });
        // Longer than a shutdown may take, so that a failure shows the log.
        let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
        ended.expect("the program exits").expect("no panic")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may already have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
