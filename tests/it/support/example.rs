//! An example that runs in its own process.

use std::{net::SocketAddr, path::PathBuf, process::Stdio};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

use super::within;

/// A running server from `examples/`, which is killed when this is dropped.
pub(crate) struct Example {
    pub(crate) process: Child,
    /// The lines it prints after its address.
    pub(crate) stdout: Lines<BufReader<ChildStdout>>,
    pub(crate) addr: SocketAddr,
}

// === impl Example ===

impl Example {
    /// Starts the example and waits until it is listening.
    ///
    /// The example takes its address as an argument, and first prints `listening on http://…/mcp`.
    pub(crate) async fn start(name: &str) -> Self {
        let mut process = Command::new(build(name).await)
            .arg("127.0.0.1:0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("the example starts");
        let mut stdout = BufReader::new(process.stdout.take().expect("piped")).lines();
        let first = within("the first line of the example", stdout.next_line()).await;
        let first = first.expect("readable").expect("a line");
        let addr = first
            .strip_prefix("listening on http://")
            .and_then(|line| line.strip_suffix("/mcp")?.parse().ok())
            .unwrap_or_else(|| panic!("no address in {first:?}"));
        Self {
            process,
            stdout,
            addr,
        }
    }
}

/// Builds the example and returns its path.
///
/// This is needed because `cargo test --test it` does not build examples.
async fn build(name: &str) -> PathBuf {
    let cargo = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--example", name])
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .await
        .expect("cargo runs");
    assert!(cargo.status.success(), "the example builds");
    let lines = cargo.stdout.split(|byte| *byte == b'\n');
    let mut messages = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let executable = messages.find_map(|message| {
        let is_example = message["target"]["name"] == name;
        message["executable"]
            .as_str()
            .filter(|_| is_example)?
            .parse()
            .ok()
    });
    executable.expect("cargo prints its path")
}
