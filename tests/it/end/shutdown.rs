//! A real signal terminates a real process, `examples/shutdown`.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    process::Command,
    time::{Instant, timeout},
};

use crate::support::{example::Example, *};

/// The example's limits, which are 3 s for calls, 1 s for cancellations and 2 s for connections.
const BOUND: Duration = Duration::from_secs(3 + 1 + 2);

/// How much a busy machine may add.
const MARGIN: Duration = Duration::from_secs(10);

#[tokio::test]
async fn ctrl_c_ends_the_process_while_calls_and_streams_are_open() {
    let mut example = Example::start("shutdown").await;
    let mcp = Mcp::session(example.addr, PATH).await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    let mut call = mcp.call(1, "work", json!({ "seconds": 600 })).await;
    assert_eq!(call.head().await.status, 200);

    example.signal("INT").await;

    let (code, stdout) = example.ended().await;
    assert_eq!(
        (code, &*stdout),
        (Some(0), "0 calls ended, 1 were cancelled\n")
    );
    let error = json!({ "code": -32800, "message": "Request cancelled: server shutting down" });
    let message = json!({ "jsonrpc": "2.0", "id": 1, "error": error });
    assert_eq!(call.messages().await, [message]);
    assert_eq!(standalone.messages().await, Vec::<Value>::new());
}

#[tokio::test]
async fn an_incomplete_request_does_not_delay_the_shutdown() {
    let mut example = Example::start("shutdown").await;
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

    let (code, stdout) = example.ended().await;
    assert_eq!(
        (code, &*stdout),
        (Some(0), "0 calls ended, 1 were cancelled\n")
    );
    drop((half_a_head, half_a_body));
}

// === impl Example ===

impl Example {
    async fn signal(&self, signal: &str) {
        let pid = self
            .process
            .id()
            .expect("the process is running")
            .to_string();
        let mut kill = Command::new("kill");
        let sent = kill.args(["-s", signal, &pid]).status().await;
        assert!(sent.expect("kill").success());
    }

    /// Returns its exit code and what it printed after its address.
    async fn ended(&mut self) -> (Option<i32>, String) {
        let started = Instant::now();
        let status = timeout(BOUND + MARGIN, self.process.wait()).await;
        let status =
            status.unwrap_or_else(|_| panic!("still running after {:?}", started.elapsed()));
        let mut stdout = String::new();
        while let Some(line) = self.stdout.next_line().await.expect("readable") {
            stdout += &line;
            stdout += "\n";
        }
        (status.expect("the process ends").code(), stdout)
    }
}
