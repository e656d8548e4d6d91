//! A real signal ends a real process: `examples/shutdown`.

use std::{net::SocketAddr, path::PathBuf, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::{Instant, timeout},
};

use crate::support::*;

/// The limits of the example: calls may end in 3 s, cancels are taken in 1 s, connections close in 2 s.
const BOUND: Duration = Duration::from_secs(3 + 1 + 2);

/// What a busy machine may add.
const MARGIN: Duration = Duration::from_secs(10);

/// The example as a process of its own. It ends with the test.
struct Example {
    process: Child,
    said: Lines<BufReader<ChildStdout>>,
    addr: SocketAddr,
}

#[tokio::test]
async fn ctrl_c_ends_the_process_while_calls_and_streams_are_open() {
    let mut example = Example::start().await;
    let mcp = Mcp::session(example.addr, PATH).await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    let mut call = mcp.call(1, "work", json!({ "seconds": 600 })).await;
    assert_eq!(call.head().await.status, 200);

    example.signal("INT").await;

    let (code, said) = example.ended().await;
    assert_eq!(
        (code, &*said),
        (Some(0), "0 calls ended, 1 were cancelled\n")
    );
    let error = json!({ "code": -32800, "message": "Request cancelled" });
    let told = json!({ "jsonrpc": "2.0", "id": 1, "error": error });
    assert_eq!(call.messages().await, [told]);
    assert_eq!(standalone.messages().await, Vec::<Value>::new());
}

#[tokio::test]
async fn half_a_request_holds_nothing_up() {
    let mut example = Example::start().await;
    let mcp = Mcp::session(example.addr, PATH).await;
    let mut half_a_head = Connection::open(example.addr).await;
    half_a_head.write(b"POST /mcp HTT").await;
    let mut half_a_body = Connection::open(example.addr).await;
    let request = mcp.call_request(2, "work", json!({}));
    let length = request.body.len() + 1;
    half_a_body.send_cut(&request, length).await;
    let mut call = mcp.call(1, "work", json!({ "seconds": 600 })).await;
    assert_eq!(call.head().await.status, 200);

    example.signal("TERM").await;

    let (code, said) = example.ended().await;
    assert_eq!(
        (code, &*said),
        (Some(0), "0 calls ended, 1 were cancelled\n")
    );
    drop((half_a_head, half_a_body));
}

// === impl Example ===

impl Example {
    async fn start() -> Self {
        let mut process = Command::new(built().await)
            .arg("127.0.0.1:0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("it starts");
        let mut said = BufReader::new(process.stdout.take().expect("piped")).lines();
        let first = within("its first line", said.next_line()).await;
        let first = first.expect("readable").expect("a line");
        let addr = first
            .strip_prefix("listening on http://")
            .and_then(|line| line.strip_suffix("/mcp")?.parse().ok())
            .unwrap_or_else(|| panic!("no address in {first:?}"));
        Self {
            process,
            said,
            addr,
        }
    }

    async fn signal(&self, signal: &str) {
        let pid = self.process.id().expect("it runs").to_string();
        let mut kill = Command::new("kill");
        let sent = kill.args(["-s", signal, &pid]).status().await;
        assert!(sent.expect("kill").success());
    }

    /// Its exit code, and what it said after its address.
    async fn ended(&mut self) -> (Option<i32>, String) {
        let begun = Instant::now();
        let status = timeout(BOUND + MARGIN, self.process.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("it runs on after {:?}", begun.elapsed()));
        let mut said = String::new();
        while let Some(line) = self.said.next_line().await.expect("readable") {
            said += &line;
            said += "\n";
        }
        (status.expect("it ends").code(), said)
    }
}

/// Where the example is. `cargo test --test it` does not build it.
async fn built() -> PathBuf {
    let build = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--example", "shutdown"])
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .await
        .expect("cargo runs");
    assert!(build.status.success(), "the example builds");
    let lines = build.stdout.split(|byte| *byte == b'\n');
    let mut messages = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let executable = messages.find_map(|message| {
        let is_it = message["target"]["name"] == "shutdown";
        message["executable"]
            .as_str()
            .filter(|_| is_it)?
            .parse()
            .ok()
    });
    executable.expect("cargo says where it is")
}
