//! The end of the program: in bounded time, whatever its clients and servers do.
//!
//! 1. It says that it is not ready any more. Clients may still come back for their answers.
//! 2. Calls may go on for `--drain`, and so may clients that read what was kept for them, or were asked to wait before they
//!    resume, and have an answer since. Then the calls that are left are cancelled, and their clients and servers are told.
//! 3. No connection is accepted any more, and those that are open may close: soon, or in what is left of `--drain` where a request
//!    other than a GET is under way, or an answer has begun. At the same time the processes of sessions end: the less time the
//!    calls have left of `SHUTDOWN_TIMEOUT`, the sooner they are signalled.
//!
//! SIGTERM, SIGINT, SIGQUIT and SIGHUP begin it. A second signal ends it at once, and what is left then is killed with the
//! runtime. A second SIGHUP does not: a terminal that closes sends several.

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
};
use tracing::{info, warn};

/// How long all of it may take: 9.5 s. Those who start programs kill them 10 s after they asked, or later.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(9_500);

/// How long the processes of sessions have at least, after a drain that took all the time that there was: 1.5 s.
pub(crate) const MIN_PROCESS_TIMEOUT: Duration = Duration::from_millis(1_500);

/// How long connections may take to close after the last call: 500 ms. They end with the process anyway.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How often it is looked whether clients have read their answers: every 20 ms.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The signals that mean something to the program.
#[derive(Debug)]
pub struct Signals(Vec<SignalStream>);

#[derive(Debug)]
struct SignalStream {
    name: &'static str,
    effect: SignalEffect,
    signal: Signal,
}

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalEffect {
    /// The end. Received once more, an immediate one.
    End,
    /// The end, however often it is received.
    Hangup,
    /// Nothing. By default it would kill the program, and leave the processes of sessions.
    Nothing,
}

/// Is ready when the program is to end.
#[derive(Debug)]
pub struct ShutdownSignal(oneshot::Receiver<()>);

// === impl Signals ===

impl Signals {
    /// Listens for them from now on. A SIGHUP that is ignored, as `nohup` has it, stays ignored.
    pub fn listen() -> io::Result<Self> {
        let mut signals = vec![
            ("SIGTERM", SignalEffect::End, SignalKind::terminate()),
            ("SIGINT", SignalEffect::End, SignalKind::interrupt()),
            ("SIGQUIT", SignalEffect::End, SignalKind::quit()),
            (
                "SIGUSR1",
                SignalEffect::Nothing,
                SignalKind::user_defined1(),
            ),
            (
                "SIGUSR2",
                SignalEffect::Nothing,
                SignalKind::user_defined2(),
            ),
        ];
        if !ignores_hangups() {
            signals.push(("SIGHUP", SignalEffect::Hangup, SignalKind::hangup()));
        }
        let listened = signals.into_iter().map(|(name, effect, kind)| {
            Ok(SignalStream {
                name,
                effect,
                signal: signal(kind)?,
            })
        });
        Ok(Self(listened.collect::<io::Result<_>>()?))
    }

    /// Waits for the next signal, and logs what it does not wait for.
    async fn next(&mut self, counts: fn(SignalEffect) -> bool) -> &'static str {
        poll_fn(|cx| {
            for listened in &mut self.0 {
                while let Poll::Ready(Some(())) = listened.signal.poll_recv(cx) {
                    let name = listened.name;
                    if counts(listened.effect) {
                        return Poll::Ready(name);
                    }
                    info!(signal = name, "signal ignored");
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Awaits what `serve` gives, which is to end after a signal: the future that it gets is ready then. Returns at once at
    /// the second.
    pub async fn serve<S: Future<Output = ()>>(
        mut self,
        drain: Duration,
        serve: impl FnOnce(ShutdownSignal) -> S,
    ) {
        let (begin, begun) = oneshot::channel();
        let mut serving = pin!(serve(ShutdownSignal(begun)));
        tokio::select! {
            () = &mut serving => return,
            signal = self.next(|effect| effect != SignalEffect::Nothing) => {
                let second = if signal == "SIGHUP" { "send SIGTERM" } else { "signal again" };
                info!("{signal}: waiting up to {drain:?} for calls (--drain); {second} to stop now");
            }
        }
        // Fails if nobody waits for it.
        let _served = begin.send(());
        tokio::select! {
            () = serving => info!("stopped"),
            signal = self.next(|effect| effect == SignalEffect::End) => {
                warn!("{signal} while stopping: stopping now, calls in flight are lost");
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

/// Returns the set of ignored signals. Bit 0 is signal 1, SIGHUP.
fn ignored_signals(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let set = lines.find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// Where there is no `/proc`: a child inherits which signals are ignored.
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
        // The sender lives as long as this is awaited.
        Pin::new(&mut self.0).poll(cx).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_see_that_a_hangup_is_ignored_agree() {
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
