//! The end of the program: in bounded time, whatever its clients and servers do.
//!
//! 1. It says that it is not ready any more. Clients may still come back for their answers.
//! 2. Calls may go on for `--drain`, and so may clients that read what was kept for them. Then the calls that are left are
//!    cancelled, and their clients and servers are told.
//! 3. No connection is accepted any more, and those that are open may close: soon, or in what is left of `--drain` where an answer
//!    has begun. At the same time the processes of sessions end: the less time the calls have left of `WHOLE`, the sooner they
//!    are signalled.
//!
//! A second signal ends it at once. Whatever is left then is killed with the runtime.

use std::{
    future::pending,
    io,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};
use tracing::{info, warn};

/// How long all of it may take: 9.5 s. Those who start programs kill them 10 s after they asked, or later.
pub(crate) const WHOLE: Duration = Duration::from_millis(9_500);

/// How long the processes of sessions have at least, after a drain that took all the time that there was: 1.5 s.
pub(crate) const ENDING: Duration = Duration::from_millis(1_500);

/// How long connections may take to close after the last call: 500 ms. They end with the process anyway.
pub(crate) const CLOSING: Duration = Duration::from_millis(500);

/// How often it is looked whether clients have read their answers: every 20 ms.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// SIGINT and SIGTERM, which init systems and containers send.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

/// Is ready when the program is to end.
#[derive(Debug)]
pub struct Stop(oneshot::Receiver<()>);

// === impl Signals ===

impl Signals {
    /// Listens for them from now on.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            Some(()) = self.interrupt.recv() => {}
            Some(()) = self.terminate.recv() => {}
            else => pending().await,
        }
    }

    /// Awaits what `serve` gives, which is to end after a signal: the future that it gets is ready then. Returns at once at
    /// the second.
    pub async fn serve<S: Future<Output = ()>>(mut self, serve: impl FnOnce(Stop) -> S) {
        let (begin, begun) = oneshot::channel();
        let mut serving = pin!(serve(Stop(begun)));
        tokio::select! {
            () = &mut serving => return,
            () = self.next() => info!("a signal: calls may end, a second one does not wait for them"),
        }
        // Fails if nobody waits for it.
        let _served = begin.send(());
        tokio::select! {
            () = serving => info!("all has ended"),
            () = self.next() => warn!("a second signal: what is under way is cut"),
        }
    }
}

// === impl Stop ===

impl Future for Stop {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // The sender lives as long as this is awaited.
        Pin::new(&mut self.0).poll(cx).map(drop)
    }
}
