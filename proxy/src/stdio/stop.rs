//! Stops a session's process.

use std::{convert::Infallible, pin::Pin, time::Duration};

use futures_util::future::join;
use rustix::process::Signal;
use tokio::time::timeout;

use super::{process::Group, session::EndReason};

/// How long a process has to exit after its stdin is closed, and again after SIGTERM.
///
/// This is also how long to wait for a killed process to exit. A different limit applies when the proxy shuts down.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// How a session ended.
#[derive(Debug)]
pub(super) struct SessionEnd {
    pub(super) reason: EndReason,
    /// Whether the process exited before its first answer without being stopped.
    pub(super) failed_to_start: bool,
    /// Whether the process had to be killed with SIGKILL.
    pub(super) was_killed: bool,
}

/// What made a process exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessEnd {
    /// It exited on its own, or after its stdin was closed.
    Exited,
    /// It exited after SIGTERM.
    Terminated,
    /// It had to be killed with SIGKILL.
    Killed,
}

/// Runs `work` to completion, then stays pending.
pub(super) async fn then_pending<T>(work: impl Future<Output = T>) -> Infallible {
    work.await;
    std::future::pending().await
}

/// Stops a process whose stdin has been closed, and returns what made it exit.
///
/// If the process does not exit in time, this sends SIGTERM, and then SIGKILL. A wrapper such as `npx` exits right away, while
/// the server behind it may have a handler for SIGTERM. So even if the process itself has exited, its descendants also get
/// SIGTERM and time to handle it. `output` completes once none of them has the pipes open. If the process exited on its own,
/// its descendants get no SIGTERM and no extra time.
pub(super) async fn stop_process(
    group: &mut Group,
    reason: EndReason,
    mut output: Pin<&mut impl Future<Output = ()>>,
) -> ProcessEnd {
    match reason {
        EndReason::Exited => return ProcessEnd::Exited,
        // Kill a process that ignores its input or a cancellation.
        EndReason::Stuck | EndReason::Overdue => {}
        EndReason::Deleted
        | EndReason::Idle
        | EndReason::Lost
        | EndReason::Evicted
        | EndReason::Shutdown(_)
        | EndReason::Closed => {
            let stop_timeout = match reason {
                EndReason::Shutdown(stop_timeout) => stop_timeout,
                _ => STOP_TIMEOUT,
            };
            let has_exited = tokio::select! {
                exit = timeout(stop_timeout, group.wait_for_exit()) => exit.is_ok(),
                never = then_pending(output.as_mut()) => match never {},
            };
            if has_exited && reason == EndReason::Closed {
                // A process's pipes close shortly before the process exits.
                return ProcessEnd::Exited;
            }
            group.signal(Signal::TERM);
            let ended = join(group.wait_for_exit(), output);
            let has_ended = timeout(stop_timeout, ended).await.is_ok();
            if has_exited {
                return ProcessEnd::Exited;
            }
            if has_ended || group.has_exited() {
                return ProcessEnd::Terminated;
            }
        }
    }
    group.signal(Signal::KILL);
    let _ = timeout(STOP_TIMEOUT, group.wait_for_exit()).await;
    ProcessEnd::Killed
}
