//! The whole program, in front of either kind of server.

use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::support::*;

/// A revision whose clients support priming events.
const PRIMED: &str = "2025-11-25";

/// The program in front of the scripted server, and the log of that server's tools.
struct Started {
    program: Program,
    addr: SocketAddr,
    client: Mcp,
    tool_log: ToolLog,
}

/// The scripted server's log, which is removed on drop.
struct ToolLog(PathBuf);

// === impl Started ===

impl Started {
    async fn with(name: &str, options: &[&str], server_options: &[&str]) -> Self {
        let tool_log = ToolLog::new(name);
        let path = tool_log.0.to_str().expect("text");
        let server = env!("CARGO_BIN_EXE_mcp-cancel-proxy");
        let mut args = vec!["--listen=127.0.0.1:0"];
        args.extend(options);
        args.extend(["--", server, "scripted-server", "--notes", path]);
        args.extend(server_options);
        let mut program = Program::start(Program::command(&args));
        let addr = program.addr();
        let client = Mcp::stateless(addr, "/mcp").version(PRIMED).connect().await;
        Self {
            program,
            addr,
            client,
            tool_log,
        }
    }

    /// Returns the text that a tool returns.
    async fn text(&self, tool: &str) -> String {
        let mut call = self.client.call("text", tool, json!({})).await;
        let answer = call.answer().await.expect("an answer");
        let text = answer["result"]["content"][0]["text"].as_str();
        text.expect("text").to_owned()
    }

    /// Returns the session's process, and one that it has started.
    async fn processes(&self) -> [Pid; 2] {
        [self.text("pid").await, self.text("fork").await].map(|pid| {
            let pid = pid.parse().expect("a number");
            Pid::from_raw(pid).expect("a process")
        })
    }

    /// Calls the tool `work` and waits until it has started.
    ///
    /// Returns the call, and the id of its first event.
    async fn work(&self, seconds: u32) -> (Connection, String) {
        let arguments = json!({ "seconds": seconds, "label": "first" });
        let mut call = self.client.call(7, "work", arguments).await;
        assert_eq!(call.head().await.status, 200);
        let first = call.event().await.expect("an event");
        self.tool_log.reach("started first").await;
        (call, first.id.expect("an id"))
    }
}

// === impl ToolLog ===

impl ToolLog {
    fn new(name: &str) -> Self {
        let name = format!("mcp-cancel-proxy-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn contains(&self, what: &str) -> bool {
        fs::read_to_string(&self.0).is_ok_and(|text| text.contains(what))
    }

    async fn reach(&self, what: &str) {
        let reached = async {
            // Polled, because nothing announces a change to the file.
            while !self.contains(what) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        within(what, reached).await;
    }
}

impl Drop for ToolLog {
    fn drop(&mut self) {
        // Fails if there is no file.
        let _ = fs::remove_file(&self.0);
    }
}

/// Waits until the processes no longer exist.
///
/// One that has exited may still be waiting for the init process to reap it.
async fn until_exited(processes: &[Pid]) {
    let exists = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
        let is_zombie = stat.is_ok_and(|stat| stat.contains(") Z "));
        !is_zombie && test_kill_process(*pid).is_ok()
    };
    let all_ended = async {
        while processes.iter().any(exists) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    within("the processes to exit", all_ended).await;
}

#[tokio::test]
async fn the_tool_of_a_command_is_cancelled_a_grace_after_the_disconnect() {
    let started = Started::with("disconnects", &["--grace=300ms"], &[]).await;
    let (call, _) = started.work(60).await;
    let disconnected = Instant::now();
    call.rst();
    started.tool_log.reach("cancelled first").await;
    assert!(disconnected.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn a_client_of_a_command_that_resumes_gets_its_answer() {
    let started = Started::with("resumes", &[], &[]).await;
    let (call, last) = started.work(1).await;
    call.fin();
    let answer = started.client.resume(&last).await.answer().await;
    let answer = answer.expect("an answer");
    assert_eq!(answer["id"], 7);
    assert!(answer["result"].is_object(), "{answer}");

    let (call, last) = started.work(1).await;
    call.rst();
    started.tool_log.reach("finished first").await;
    let answer = started.client.resume(&last).await.answer().await;
    assert_eq!(
        answer.expect("an answer")["id"],
        7,
        "the client resumes late"
    );
    assert!(!started.tool_log.contains("cancelled"));
}

#[tokio::test]
async fn the_calls_of_a_command_that_is_killed_end_with_an_error_and_clients_begin_anew() {
    let started = Started::with("killed", &[], &[]).await;
    let processes = started.processes().await;
    let (mut call, _) = started.work(60).await;
    kill_process(processes[0], Signal::KILL).expect("the process is running");
    let error = call.answer().await.expect("an error");
    assert_eq!(
        (&error["id"], &error["error"]["code"]),
        (&7.into(), &(-32000).into())
    );
    let message = error["error"]["message"].as_str().expect("text");
    assert!(message.contains("signal 9"), "{message}");
    until_exited(&processes).await;
    assert_eq!(started.client.notify("ping", json!({})).await, 404);
    let mut again = Mcp::session(started.addr, "/mcp")
        .await
        .call(1, "pid", json!({}))
        .await;
    assert!(again.answer().await.expect("an answer")["result"].is_object());
}

#[tokio::test]
async fn a_signal_ends_the_program_and_its_processes_in_time() {
    let started = Started::with("signal", &["--drain=300ms"], &["--stubborn"]).await;
    let processes = started.processes().await;
    let (mut call, _) = started.work(60).await;
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(started.client.listen().await);
    }
    open.push(
        started
            .client
            .call(8, "work", json!({ "seconds": 60, "ignores_cancel": true }))
            .await,
    );
    let signalled = Instant::now();
    started.program.signal(Signal::TERM);
    let error = call.answer().await.expect("an error");
    assert_eq!(
        (&error["id"], &error["error"]["code"]),
        (&7.into(), &(-32800).into())
    );
    started.tool_log.reach("cancelled first").await;
    let (status, logged) = started.program.ended().await;
    assert!(signalled.elapsed() < Duration::from_secs(10), "{logged}");
    assert!(status.success(), "{logged}");
    until_exited(&processes).await;
}

#[tokio::test]
async fn a_second_signal_kills_all_processes_of_the_program() {
    let mut started = Started::with("second", &["--drain=1h"], &["--stubborn"]).await;
    let processes = started.processes().await;
    let (_call, _) = started.work(60).await;
    started.program.signal(Signal::INT);
    while !started.program.line().contains("waiting up to") {}
    sleep(REPEAT_WINDOW).await;
    started.program.signal(Signal::INT);
    let (status, logged) = started.program.ended().await;
    assert!(status.success(), "{logged}");
    until_exited(&processes).await;
}

#[tokio::test]
async fn a_command_is_served_only_at_its_path() {
    let started = Started::with("path", &[], &[]).await;
    for path in ["/", "/mcp/", "/.well-known/oauth-protected-resource"] {
        let reply = Connection::fetch(started.addr, &Request::new("GET", path)).await;
        assert_eq!(reply.status, 404, "{path}");
    }
}

/// Starts the program in front of an upstream without an event store, and opens the session "s".
async fn start_in_front_of(upstream: &Upstream, options: &[&str]) -> (Program, Mcp) {
    let url = format!("http://{}/mcp", upstream.addr);
    let mut args = vec!["--listen=127.0.0.1:0", "--upstream", &url];
    args.extend(options);
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let connecting = Mcp::stateless(addr, "/mcp").version(PRIMED).connect();
    let serving = async {
        let initialize = upstream.next_request().await;
        let result = r#"{"jsonrpc":"2.0","id":"initialize","result":{}}"#;
        let head = "200 OK\r\ncontent-type: application/json\r\nmcp-session-id: s";
        initialize.answer(head, result).await;
        upstream
            .next_request()
            .await
            .answer("202 Accepted", "")
            .await;
    };
    let (client, ()) = tokio::join!(connecting, serving);
    (program, client)
}

/// Starts a call, and returns it with the id of its stream's first event and the upstream's request.
async fn call(upstream: &Upstream, client: &Mcp, id: u32) -> (Connection, String, ReceivedRequest) {
    let mut call = client.call(id, "work", json!({})).await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    assert_eq!(call.head().await.status, 200);
    let first = call.event().await.expect("an event");
    (call, first.id.expect("an id"), received)
}

#[tokio::test]
async fn the_call_of_an_upstream_is_cancelled_a_grace_after_the_disconnect() {
    let upstream = Upstream::start().await;
    let (_program, client) = start_in_front_of(&upstream, &["--grace=300ms"]).await;
    let (call, _, mut received) = call(&upstream, &client, 7).await;
    let disconnected = Instant::now();
    call.rst();
    let cancel = upstream.next_request().await;
    assert!(disconnected.elapsed() >= Duration::from_millis(300));
    let message: Value = serde_json::from_str(cancel.body()).expect("JSON");
    assert_eq!(message["method"], "notifications/cancelled");
    assert_eq!(message["params"]["requestId"], 7);
    assert_eq!(cancel.headers["mcp-session-id"], "s");
    cancel.answer("202 Accepted", "").await;
    // Otherwise the upstream's stream would stay open.
    received.closed().await;
}

#[tokio::test]
async fn a_client_of_an_upstream_without_a_store_resumes_and_gets_its_answer() {
    let upstream = Upstream::start().await;
    let (_program, client) = start_in_front_of(&upstream, &[]).await;
    let (call, last, mut received) = call(&upstream, &client, 7).await;
    call.rst();
    let mut resumed = client.resume(&last).await;
    assert_eq!(resumed.head().await.status, 200);
    let answer = r#"{"jsonrpc":"2.0","id":7,"result":{"a":1.0}}"#;
    received.chunk(&format!("data: {answer}\n\n")).await;
    received.end().await;
    assert_eq!(
        resumed.answer_event().await.expect("the answer").data,
        answer
    );

    let mut late = client.resume(&last).await;
    assert_eq!(late.head().await.status, 200);
    assert_eq!(late.answer_event().await.expect("the answer").data, answer);
    assert!(
        !upstream.has_more().await,
        "the upstream must not receive any of this"
    );
}

#[tokio::test]
async fn a_signal_ends_the_program_in_front_of_an_upstream_with_streams_open() {
    let upstream = Upstream::start().await;
    let (program, client) = start_in_front_of(&upstream, &["--drain=300ms"]).await;
    let (mut open, _, _received) = call(&upstream, &client, 7).await;
    let (abandoned, _, _received) = call(&upstream, &client, 8).await;
    abandoned.rst();
    let started = Instant::now();
    program.signal(Signal::TERM);
    let error = open.answer().await.expect("an error");
    assert_eq!(error["error"]["code"], -32800);
    let (status, logged) = program.ended().await;
    assert!(status.success(), "{logged}");
    assert!(started.elapsed() < Duration::from_secs(10), "{logged}");
}
