//! Shuts the program down in bounded time, whatever its clients and servers do.
//!
//! SIGTERM, SIGINT, SIGQUIT or SIGHUP starts the shutdown, which has three steps:
//!
//! 1. `/readyz` starts returning 503. Clients can still resume to get their answers.
//! 2. For up to `--drain`, the proxy waits for calls to end. It also waits for clients reading stored events, and for the calls
//!    in `keep_running`. If an answer is waiting for a disconnected client, the proxy waits for as long as the client may still
//!    resume within its reconnect delay. Then it cancels the remaining calls: their clients receive an error, and their servers
//!    a cancellation.
//! 3. The proxy stops accepting connections and closes the open ones. If an answer is still in flight, connections may stay
//!    open for the rest of `--drain`. A GET counts as having an answer in flight once it has a response; any other request
//!    counts as soon as its head has arrived. Meanwhile, the proxy stops the session processes, within the rest of
//!    `SHUTDOWN_TIMEOUT` or within `MIN_PROCESS_TIMEOUT`, whichever is longer.
//!
//! A second signal stops the program right away, and the runtime then kills the remaining processes. Two kinds of second signal
//! are ignored: a SIGHUP, because a terminal sends several when it closes, and any signal within 500 ms of the first.

use std::{
    fs,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    process::{Command, Stdio},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::Instant,
};
use tracing::{info, warn};

/// Time limit for a shutdown. A longer `--drain` extends it.
///
/// Process managers wait at least 10 s after their signal before they kill a program.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(9_500);

/// Minimum time for session processes to exit after the drain.
pub(crate) const MIN_PROCESS_TIMEOUT: Duration = Duration::from_millis(1_500);

/// How long connections have to close gracefully. After that, they are dropped unless an answer is in flight.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long after the first signal a second signal is treated as a repetition.
///
/// A process manager may signal an entire process group, and a wrapper in that group, such as npm, then forwards the signal
/// again.
const REPEAT_WINDOW: Duration = Duration::from_millis(500);

/// How often the shutdown checks whether clients have read their answers.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The signals that the program handles.
#[derive(Debug)]
pub struct Signals(Vec<SignalStream>);

#[derive(Debug)]
struct SignalStream {
    name: &'static str,
    effect: SignalEffect,
    signal: Signal,
}

/// What the program does when it receives a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalEffect {
    /// Starts the shutdown, or stops the program at once if the shutdown has already started.
    End,
    /// Starts the shutdown. Has no effect once the shutdown has started.
    Hangup,
    /// Has no effect. Without a handler, the signal would kill the program but not the session processes.
    Ignored,
}

/// A future that completes when the shutdown starts.
#[derive(Debug)]
pub struct ShutdownSignal(oneshot::Receiver<()>);

// === impl Signals ===

impl Signals {
    /// Starts handling the signals. If SIGHUP is already ignored, as under `nohup`, it stays ignored.
    pub fn listen() -> io::Result<Self> {
        let mut signals = vec![
            ("SIGTERM", SignalEffect::End, SignalKind::terminate()),
            ("SIGINT", SignalEffect::End, SignalKind::interrupt()),
            ("SIGQUIT", SignalEffect::End, SignalKind::quit()),
            (
                "SIGUSR1",
                SignalEffect::Ignored,
                SignalKind::user_defined1(),
            ),
            (
                "SIGUSR2",
                SignalEffect::Ignored,
                SignalKind::user_defined2(),
            ),
        ];
        if !ignores_hangups() {
            signals.push(("SIGHUP", SignalEffect::Hangup, SignalKind::hangup()));
        }
        let streams = signals.into_iter().map(|(name, effect, kind)| {
            Ok(SignalStream {
                name,
                effect,
                signal: signal(kind)?,
            })
        });
        Ok(Self(streams.collect::<io::Result<_>>()?))
    }

    /// Waits for the next signal whose effect passes `filter`, and logs any others as ignored.
    async fn next(&mut self, filter: fn(SignalEffect) -> bool) -> &'static str {
        poll_fn(|cx| {
            for stream in &mut self.0 {
                while let Poll::Ready(Some(())) = stream.signal.poll_recv(cx) {
                    let name = stream.name;
                    if filter(stream.effect) {
                        return Poll::Ready(name);
                    }
                    info!(signal = name, "signal ignored");
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs the future returned by `serve` until it completes or a second signal stops it.
    ///
    /// The first signal completes the [`ShutdownSignal`] passed to `serve`. A second SIGHUP does not stop the future, nor does
    /// any signal within 500 ms of the first. `drain` is only used in a log line.
    pub async fn serve<S: Future<Output = ()>>(
        mut self,
        drain: Duration,
        serve: impl FnOnce(ShutdownSignal) -> S,
    ) {
        let (start, started) = oneshot::channel();
        let mut serving = pin!(serve(ShutdownSignal(started)));
        tokio::select! {
            () = &mut serving => return,
            signal = self.next(|effect| effect != SignalEffect::Ignored) => {
                let second = if signal == "SIGHUP" { "send SIGTERM" } else { "signal again" };
                info!("{signal}: waiting up to {drain:?} for calls (--drain); {second} to stop now");
            }
        }
        let first_signal = Instant::now();
        // Fails if the receiver has been dropped.
        let _ = start.send(());
        loop {
            tokio::select! {
                () = &mut serving => return info!("stopped"),
                signal = self.next(|effect| effect == SignalEffect::End) => {
                    if first_signal.elapsed() > REPEAT_WINDOW {
                        return warn!("{signal} while stopping: stopping immediately, calls in flight will be lost");
                    }
                    info!(signal, "signal ignored");
                }
            }
        }
    }
}

/// Returns `true` if this process was started with SIGHUP ignored.
fn ignores_hangups() -> bool {
    let status = fs::read_to_string("/proc/self/status");
    let ignored = status.ok().as_deref().and_then(ignored_signals);
    ignored.map_or_else(child_survives_hangup, |ignored| ignored & 1 == 1)
}

/// Parses the set of ignored signals from `status`, if present. Bit 0 is signal 1, SIGHUP.
fn ignored_signals(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let set = lines.find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// Returns `true` if a child, which inherits ignored signals, survives SIGHUP.
///
/// This is the fallback for systems without `/proc`.
fn child_survives_hangup() -> bool {
    let mut child = Command::new("/bin/sh");
    child.args(["-c", "kill -HUP $$"]);
    child
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    child.status().is_ok_and(|status| status.success())
}

// === impl ShutdownSignal ===

impl Future for ShutdownSignal {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // This can't fail, because the sender always sends before it is dropped.
        Pin::new(&mut self.0).poll(cx).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_checks_for_an_ignored_hangup_agree() {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        if let Some(ignored) = ignored_signals(&status) {
            assert_eq!(child_survives_hangup(), ignored & 1 == 1);
        }
        assert_eq!(
            ignored_signals("SigBlk:\t0\nSigIgn:\t0000000000001001\n"),
            Some(0x1001)
        );
        assert_eq!(ignored_signals("Name:\tx\n"), None);
    }
}
