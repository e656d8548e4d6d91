//! Session processes that do what no server should.
//!
//! The process of the session under test serves as usual. The fault happens to another session's process, or to a second call, so that the
//! table also covers whether one session can harm another.

use serde_json::{Value, json};

use crate::{
    started::{Setup, Started},
    support::{Mcp, within},
    table::{Phase, run},
};

#[derive(Debug, Clone, Copy)]
enum Fault {
    Exits,
    Aborts,
    Forks,
    FloodsStderr,
    FloodsStdout,
    WritesHalfLines,
    WritesLongLines,
}

// === impl Fault ===

impl Fault {
    const ALL: [Self; 7] = [
        Self::Exits,
        Self::Aborts,
        Self::Forks,
        Self::FloodsStderr,
        Self::FloodsStdout,
        Self::WritesHalfLines,
        Self::WritesLongLines,
    ];

    /// Returns the tool that causes the fault, and its arguments.
    fn tool(self) -> (&'static str, Value) {
        match self {
            Self::Exits => ("exit", json!({ "code": 3 })),
            Self::Aborts => ("abort", json!({})),
            Self::Forks => ("fork", json!({})),
            Self::FloodsStderr => ("chat", json!({ "lines": 20_000, "length": 100 })),
            Self::FloodsStdout => ("notify", json!({ "lines": 5_000 })),
            Self::WritesHalfLines => (
                "say",
                json!({ "text": "{\"jsonrpc\":\"2.0\",\"id\":1,\n\n" }),
            ),
            Self::WritesLongLines => ("say", json!({ "length": 20 << 20 })),
        }
    }

    /// Returns `true` if the process exits, so that its call ends with an error giving the exit status.
    fn ends_process(self) -> bool {
        matches!(self, Self::Exits | Self::Aborts)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_misbehaves_affects_no_other_session() {
    run(&Fault::ALL, cell).await;
}

/// Checks that a fault has its effect in one session, but none in the session under test.
async fn cell(fault: Fault, phase: Phase) {
    // No session can be started while the program is draining.
    let is_draining = phase == Phase::Draining;
    let first_phase = if is_draining {
        Phase::CallInFlight
    } else {
        phase
    };
    let mut started = Started::in_phase(Setup::default(), first_phase).await;
    let other = Mcp::stateless(started.addr, "/mcp").version("2025-11-25");
    let other = within("another session", other.connect()).await;
    if is_draining {
        started.signal(rustix::process::Signal::TERM);
        started.wait_until_draining().await;
    }
    let (tool, arguments) = fault.tool();
    let mut call = other.call(1, tool, arguments).await;
    let answer = within("the other session's answer", call.answer()).await;
    let answer = answer.expect("the other session's answer");
    if fault.ends_process() {
        let message = answer["error"]["message"].as_str().expect("an error");
        assert!(message.contains("has exited"), "{answer}");
        let mut late = other.call(2, "pid", json!({})).await;
        assert_eq!(late.head().await.status, 404);
    } else {
        assert!(answer["result"].is_object(), "{answer}");
    }
    drop(call);
    started.client_is_served(phase).await;
    if is_draining {
        return started.drains().await;
    }
    if !fault.ends_process() {
        assert_eq!(within("DELETE", other.delete()).await, 204);
    }
    started.session_leaves_no_state().await;
    started.ends_by_sigterm().await;
}

/// What a shell does in place of a server.
#[derive(Debug, Clone, Copy)]
enum Script {
    ExitsAtOnce,
    ClosesItsStdout,
    LeavesItsGroup,
    IgnoresSignals,
    IsSlowToStart,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_not_a_server_causes_an_error_and_leaves_no_process() {
    for script in [
        Script::ExitsAtOnce,
        Script::ClosesItsStdout,
        Script::LeavesItsGroup,
        Script::IgnoresSignals,
        Script::IsSlowToStart,
    ] {
        check_script(script).await;
    }
}

/// Checks what a script's client gets, and that no process is left.
///
/// Scripts that act as a server answer. For all others the client gets an error.
async fn check_script(script: Script) {
    let answers = r#"read line; echo '{"jsonrpc":"2.0","id":"i","result":{}}'"#;
    let text = match script {
        Script::ExitsAtOnce => "exit 3".to_owned(),
        Script::ClosesItsStdout => "exec >&-; sleep 600".to_owned(),
        Script::LeavesItsGroup => format!("setsid sleep 2 & {answers}; cat >/dev/null"),
        Script::IgnoresSignals => format!("trap '' TERM HUP INT; {answers}; sleep 600"),
        Script::IsSlowToStart => format!("sleep 3; {answers}; cat >/dev/null"),
    };
    let mut started = Started::in_front_of(Setup::default(), &["/bin/sh", "-c", &text]).await;
    let client = Mcp::stateless(started.addr, "/mcp");
    let mut first = client.request("i", "initialize", json!({})).await;
    let answer = within("an answer", first.answer())
        .await
        .expect("an answer");
    let is_server = !matches!(script, Script::ExitsAtOnce | Script::ClosesItsStdout);
    assert_eq!(
        answer["result"].is_object(),
        is_server,
        "{script:?}: {answer}"
    );
    if !is_server {
        assert_eq!(answer["id"], "i");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    drop(first);
    let metrics = started.metrics().await;
    assert!(metrics.contains("mcp_proxy_children"), "{metrics}");
    started.ends_by_sigterm().await;
    started.assert_no_child();
}
