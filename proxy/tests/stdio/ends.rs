//! The end of a session, after which none of its processes or streams may be left.

use std::time::Duration;

use http::StatusCode;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep, timeout};

use crate::{client::*, server::*};

/// How long a call may take to end after its server has exited.
///
/// The machine may be busy.
const END_TIMEOUT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_crash_ends_every_call_with_its_status_and_the_session_with_404() {
    let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
    let pid = client.pid().await;
    let mut first = client.call("1", "work", r#"{"seconds":60}"#).await;
    let mut second = client.call("2", "work", r#"{"seconds":60}"#).await;
    let mut crash = client.call("3", "exit", r#"{"code":3}"#).await;
    for events in [&mut first, &mut second, &mut crash] {
        let error = timeout(END_TIMEOUT, events.answer()).await.unwrap();
        assert_eq!(error["error"]["code"], -32000);
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("exit code 3"),
            "{error}"
        );
    }
    until_exited(pid).await;
    assert_eq!(
        client
            .post(r#"{"jsonrpc":"2.0","id":4,"method":"ping"}"#)
            .await
            .status(),
        StatusCode::NOT_FOUND
    );
    assert_eq!(client.get(None).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(client.delete().await, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_exit_by_a_signal_is_reported_as_one() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let error = client.call("1", "abort", "{}").await.answer().await;
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("signal 6"),
        "{error}"
    );
}

#[tokio::test]
async fn after_a_crash_a_late_client_still_gets_an_earlier_answer() {
    let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
    let mut events = client.call("1", "pid", "{}").await;
    let primed = events.next().await.unwrap();
    assert!(events.answer().await["result"].is_object());
    drop(events);
    let mut crash = client.call("2", "exit", r#"{"code":3}"#).await;
    let lost = crash.next().await.unwrap();
    assert!(crash.answer().await["error"].is_object());
    let mut resumed = Events::of(client.get(primed.id.as_deref()).await);
    assert!(resumed.answer().await["result"].is_object());
    let mut resumed = Events::of(client.get(lost.id.as_deref()).await);
    assert!(
        resumed.answer().await["error"]["message"]
            .as_str()
            .unwrap()
            .contains("exit code 3")
    );
}

#[tokio::test]
async fn a_grandchild_that_holds_stdout_does_not_hide_the_crash() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let grandchild: i32 = client.text("fork", "{}").await.parse().unwrap();
    assert!(process_exists(grandchild));
    let mut crash = client.call("3", "exit", r#"{"code":3}"#).await;
    let error = timeout(END_TIMEOUT, crash.answer()).await.unwrap();
    assert_eq!(error["error"]["code"], -32000);
    until_exited(grandchild).await;
}

#[tokio::test]
async fn a_delete_ends_calls_the_process_and_its_children() {
    let stdio = serve(scripted(&[]));
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let (pid, grandchild) = (
        client.pid().await,
        client.text("fork", "{}").await.parse().unwrap(),
    );
    let mut working = client.call("1", "work", r#"{"seconds":60}"#).await;
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    assert!(
        working
            .rest()
            .await
            .iter()
            .all(|message| !message.contains("result"))
    );
    until_exited(pid).await;
    until_exited(grandchild).await;
    assert_eq!(
        client.notify(r#"{"jsonrpc":"2.0","method":"x"}"#).await,
        StatusCode::NOT_FOUND
    );
    until(|| stdio.stats().children == 0).await;
    assert_eq!(stdio.stats().kills, 0, "closing its stdin was enough");
}

#[tokio::test]
async fn a_server_that_ignores_the_end_of_stdin_and_sigterm_is_killed() {
    let stdio = serve(scripted(&["--stubborn"]));
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let pid = client.pid().await;
    let started = Instant::now();
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "the DELETE has waited for the process"
    );
    until_exited(pid).await;
    assert!(
        started.elapsed() >= Duration::from_secs(4),
        "the process had no time to exit"
    );
    until(|| stdio.stats().kills == 1).await;
}

#[tokio::test]
async fn a_session_ends_soon_after_its_client_has_disconnected() {
    let mut options = scripted(&[]);
    options.lost_timeout = Some(Duration::from_millis(400));
    let stdio = serve(options);
    let (client, quiet) = (
        Client::begin(&stdio, WITHOUT_PRIMING).await,
        Client::begin(&stdio, WITHOUT_PRIMING).await,
    );
    let pid = client.pid().await;
    let listening = client.get(None).await;
    assert_eq!(listening.status(), StatusCode::OK);
    let mut working = client.call("1", "work", r#"{"seconds":1}"#).await;
    drop(listening);
    assert!(working.answer().await["result"].is_object());
    assert!(process_exists(pid), "a call in flight counts as use");
    until_exited(pid).await;
    let pid = quiet.pid().await;
    assert!(process_exists(pid), "this client has not had a stream");
    drop(quiet.get(None).await);
    let mut working = quiet.call("2", "work", r#"{"seconds":0}"#).await;
    assert!(working.answer().await["result"].is_object());
    sleep(Duration::from_secs(1)).await;
    assert!(process_exists(pid), "the client still sends requests");
}

/// Such a client may be an agent that is stopped just after it has started.
#[tokio::test]
async fn a_client_that_had_a_stream_for_a_moment_counts_as_disconnected() {
    let mut options = scripted(&[]);
    options.lost_timeout = Some(Duration::from_millis(400));
    let (client, pid) = Client::with_process(options).await;
    drop(client.get(None).await);
    until_exited(pid).await;
}

/// Both streams end, and the layer then cancels the call.
#[tokio::test]
async fn the_cancel_of_a_call_does_not_count_as_a_request_of_its_client() {
    let mut options = scripted(&[]);
    options.lost_timeout = Some(Duration::from_millis(400));
    let (client, pid) = Client::with_process(options).await;
    let listening = client.get(None).await;
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"work","arguments":{"seconds":60}}}"#;
    let working = client.post_through_layer(call).await;
    drop((listening, working));
    until_exited(pid).await;
}

#[tokio::test]
async fn an_unused_session_ends() {
    let mut options = scripted(&[]);
    options.session_timeout = Some(Duration::from_millis(300));
    let (client, pid) = Client::with_process(options).await;
    // A call in flight and an attached client count as use.
    let mut working = client.call("1", "work", r#"{"seconds":1}"#).await;
    assert!(working.answer().await["result"].is_object());
    let listening = client.get(None).await;
    assert_eq!(listening.status(), StatusCode::OK);
    sleep(Duration::from_secs(1)).await;
    assert!(process_exists(pid));
    drop(listening);
    until_exited(pid).await;
    assert_eq!(client.notify(NOTIFICATION).await, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_session_whose_request_is_arriving_does_not_end() {
    let mut options = scripted(&[]);
    options.session_timeout = Some(Duration::from_millis(300));
    let client = Client::begin(&serve(options), WITHOUT_PRIMING).await;
    let meanwhile = sleep(Duration::from_secs(1));
    let (status, ()) = client.post_slowly(NOTIFICATION, meanwhile).await;
    assert_eq!(status, StatusCode::ACCEPTED);
}

/// The client might have sent a request during the stall.
#[tokio::test]
async fn a_session_does_not_end_because_the_program_stalled() {
    let timeout = Duration::from_millis(400);
    let (mut idle, mut lost) = (scripted(&[]), scripted(&[]));
    (idle.session_timeout, lost.lost_timeout) = (Some(timeout), Some(timeout));
    for options in [idle, lost] {
        let client = Client::begin(&serve(options), WITHOUT_PRIMING).await;
        drop(client.get(None).await);
        stall(2 * timeout);
        sleep(timeout / 4).await;
        assert_eq!(client.notify(NOTIFICATION).await, StatusCode::ACCEPTED);
    }
}

/// The program and the server stall, as if both had been suspended.
#[tokio::test]
async fn a_server_is_not_killed_because_the_program_stalled() {
    let kill_after = Duration::from_secs(2);
    let mut options = scripted(&[]);
    options.kill_after = Some(kill_after);
    let stdio = serve(options);
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let server = Pid::from_raw(client.pid().await).unwrap();
    let working = client.call("1", "work", r#"{"seconds":1,"ignores_cancel":true}"#);
    let mut working = working.await;
    let _progress = working.message().await;
    kill_process(server, Signal::STOP).unwrap();
    assert_eq!(client.cancel("1").await, StatusCode::ACCEPTED);
    // Gives the session time to start waiting for the server.
    sleep(Duration::from_millis(50)).await;
    stall(kill_after + kill_after / 2);
    kill_process(server, Signal::CONT).unwrap();
    assert_eq!(client.pid().await, server.as_raw_pid());
    sleep(kill_after).await;
    assert_eq!(stdio.stats().children, 1);
}

#[tokio::test]
async fn the_processes_end_with_the_last_handle() {
    let (client, pid) = Client::with_process(scripted(&[])).await;
    drop(client);
    until_exited(pid).await;
}

#[test]
fn the_processes_end_with_the_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (pid, grandchild) = runtime.block_on(async {
        let client = Client::begin(&serve(scripted(&["--stubborn"])), WITHOUT_PRIMING).await;
        let pids = (
            client.pid().await,
            client.text("fork", "{}").await.parse().unwrap(),
        );
        // The session's task is dropped with the runtime, without being notified.
        std::mem::forget(client);
        pids
    });
    drop(runtime);
    let other = tokio::runtime::Runtime::new().unwrap();
    other.block_on(until_exited(grandchild));
    other.block_on(until_exited(pid));
}

#[tokio::test]
async fn a_shutdown_ends_everything_in_time() {
    let stdio = serve(scripted(&["--stubborn"]));
    let mut pids = Vec::new();
    for _ in 0..5 {
        pids.push(Client::begin(&stdio, WITHOUT_PRIMING).await.pid().await);
    }
    let (started, within) = (Instant::now(), Duration::from_secs(3));
    stdio.shutdown(within).await;
    assert!(started.elapsed() < within);
    assert!(!pids.into_iter().any(process_exists));
    let refused = begin(&stdio).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn with_kill_after_a_process_whose_call_does_not_stop_is_killed() {
    let mut options = scripted(&[]);
    options.kill_after = Some(Duration::from_millis(300));
    let stdio = serve(options);
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let pid = client.pid().await;
    let mut working = client
        .call("1", "work", r#"{"seconds":60,"ignores_cancel":true}"#)
        .await;
    let _progress = working.message().await;
    let mut other = client.call("2", "work", r#"{"seconds":60}"#).await;
    assert_eq!(client.cancel("1").await, StatusCode::ACCEPTED);
    let error = other.answer().await;
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("was killed"),
        "{error}"
    );
    until_exited(pid).await;
    until(|| stdio.stats().kills == 1).await;
}

#[tokio::test]
async fn servers_that_crash_at_once_are_not_restarted_forever() {
    let stdio = serve(scripted(&["--crash"]));
    for _ in 0..3 {
        let (_client, mut events) = Client::initialize(&stdio, WITHOUT_PRIMING).await;
        let error = events.answer().await;
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("exit code 7"),
            "{error}"
        );
        until(|| stdio.stats().children == 0).await;
    }
    assert_refused(&begin(&stdio).await, "10");
}

#[tokio::test]
async fn a_command_that_cannot_be_run_is_a_clear_error() {
    let error = mcp_cancel_proxy::stdio::Stdio::new(
        mcp_cancel_proxy::stdio::Options::new(mcp_cancel_proxy::stdio::Program::new(
            "no-such-command",
            [],
        )),
        mcp_cancel_proxy::event_store::EventStore::new(
            mcp_cancel_proxy::event_store::Limits::default(),
        ),
    );
    assert!(error.unwrap_err().to_string().contains("`no-such-command`"));
    // The file exists but cannot be run.
    let stdio = serve(mcp_cancel_proxy::stdio::Options::new(
        mcp_cancel_proxy::stdio::Program::new("/etc/passwd", []),
    ));
    let refused = begin(&stdio).await;
    assert_eq!(refused.status(), StatusCode::BAD_GATEWAY);
    assert!(
        json(refused).await["error"]["message"]
            .as_str()
            .unwrap()
            .contains("cannot be started")
    );
}

#[tokio::test]
async fn no_process_outlives_its_session_in_a_hundred_runs() {
    end_sessions(100).await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn no_process_outlives_its_session_in_a_thousand_runs() {
    end_sessions(1_000).await;
}

/// Ends sessions in four different ways.
///
/// Each session has a shell with a child that holds the pipes open.
async fn end_sessions(runs: u32) {
    // The shell answers the first line, and exits after two more.
    let script = r#"sleep 600 & read line; echo '{"jsonrpc":"2.0","id":0,"result":{"pids":['$$,$!']}}'; read line; read line; exit 3"#;
    let options = shell(script);
    let mut short_timeout = options.clone();
    short_timeout.session_timeout = Some(Duration::from_millis(50));
    let short_timeout = serve(short_timeout);
    let mut stdio = serve(options.clone());
    let mut slowest = Duration::ZERO;
    for run in 0..runs {
        let is_idle = run % 4 == 2;
        let (client, mut events) = Client::initialize(
            if is_idle { &short_timeout } else { &stdio },
            WITHOUT_PRIMING,
        )
        .await;
        let answer = events.answer().await;
        let pids = answer["result"]["pids"].as_array().unwrap().iter();
        let pids: Vec<i32> = pids
            .map(|pid| pid.as_i64().unwrap().try_into().unwrap())
            .collect();
        let started = Instant::now();
        match run % 4 {
            0 => {
                let notification = r#"{"jsonrpc":"2.0","method":"x"}"#;
                assert_eq!(client.notify(notification).await, StatusCode::ACCEPTED);
                let mut call = client
                    .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
                    .await;
                let error = call.answer().await;
                let text = error["error"]["message"].as_str().unwrap();
                assert!(text.contains("exit code 3"), "{error}");
                assert!(started.elapsed() < END_TIMEOUT);
            }
            1 => assert_eq!(client.delete().await, StatusCode::NO_CONTENT),
            2 => {}
            _ => {
                drop(client);
                stdio = serve(options.clone());
            }
        }
        for pid in pids {
            until_exited(pid).await;
        }
        slowest = slowest.max(started.elapsed());
    }
    println!("{runs} runs; the slowest group had exited after {slowest:?}");
    assert!(slowest < LIMIT);
}

/// As with `npx` and `sh -c`, the wrapper exits at once on SIGTERM, but the server behind it has a handler.
#[tokio::test]
async fn a_server_behind_a_wrapper_has_two_seconds_after_sigterm() {
    let path = log_path();
    let script = format!(
        r#"(trap 'sleep 0.5; echo clean > {}; exit' TERM; while :; do sleep 0.1; done) &
        read line; echo '{{"jsonrpc":"2.0","id":0,"result":{{}}}}'; wait"#,
        path.display()
    );
    let client = Client::begin(&serve(shell(&script)), WITHOUT_PRIMING).await;
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    until(|| client.stdio.stats().children == 0).await;
    assert!(path.exists(), "the server was killed while cleaning up");
}

/// In a crash, the pipes close a little before the process exits. A helper that ignores SIGTERM still holds its standard error.
#[tokio::test]
async fn the_calls_of_a_process_that_crashed_do_not_wait_for_its_helpers() {
    let script = r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'
        (trap '' TERM; sleep 600) >/dev/null & read line; read line; exec 1>&-; exit 3"#;
    let client = Client::begin(&serve(shell(script)), WITHOUT_PRIMING).await;
    let started = Instant::now();
    let mut call = client
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
        .await;
    let error = call.answer().await;
    assert_eq!(error["error"]["code"], -32000, "{error}");
    // Less time than the helper would have after SIGTERM.
    let limit = Duration::from_millis(1_500);
    assert!(started.elapsed() < limit, "{:?}", started.elapsed());
}
