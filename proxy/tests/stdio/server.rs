//! The scripted server behind the service.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use mcp_cancel_proxy::{
    event_store::{EventStore, Limits},
    stdio::{Options, Program, Stdio},
};
use rustix::process::{Pid, test_kill_process};
use tokio::time::{Instant, sleep};

/// The time limit for every wait, with plenty to spare.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Returns the options for the scripted server with these arguments.
pub fn scripted(arguments: &[&str]) -> Options {
    let arguments = ["scripted-server"].iter().chain(arguments);
    let arguments: Vec<OsString> = arguments.map(OsString::from).collect();
    Options::new(Program::new(
        env!("CARGO_BIN_EXE_mcp-cancel-proxy"),
        arguments,
    ))
}

/// Returns the options for a shell script.
pub fn shell(script: &str) -> Options {
    Options::new(Program::new("sh", ["-c".into(), script.into()]))
}

pub fn serve(options: Options) -> Stdio {
    Stdio::new(options, EventStore::new(Limits::default())).unwrap()
}

/// Returns a path that no other test uses.
pub fn log_path() -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("mcp-notes-{}-{next}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// Stalls the program, as if it had been suspended.
#[allow(
    clippy::disallowed_methods,
    reason = "it must block the runtime's only thread"
)]
pub fn stall(time: Duration) {
    std::thread::sleep(time);
}

/// Waits until a process no longer exists.
pub async fn until_exited(pid: i32) {
    until(|| !process_exists(pid)).await;
}

/// Returns `true` if a process is running.
///
/// An orphan that has exited may still be waiting for the init process to reap it.
pub fn process_exists(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let is_zombie = stat.is_ok_and(|stat| stat.contains(") Z "));
    !is_zombie && test_kill_process(Pid::from_raw(pid).unwrap()).is_ok()
}

/// Polls a condition that no event announces.
pub async fn until(mut is_met: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_met() {
        assert!(started.elapsed() < LIMIT, "the condition has not been met");
        sleep(Duration::from_millis(5)).await;
    }
}
