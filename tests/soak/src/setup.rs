//! The set-ups of the server, and what each promises. The server is built from this, and the referee judges by it.

use std::time::Duration;

use crate::clock::{MILLI, Micros, SECOND};

/// A route of the server under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub route: &'static str,
    /// Clients have sessions, unless they speak 2026-07-28.
    pub sessions: bool,
    /// With `CancellableSessionManager`.
    pub wrapped: bool,
    /// Answers with JSON where rmcp can.
    pub json: bool,
    /// How long a handler may go on that does not heed its token.
    pub abort: Option<Duration>,
    pub call_timeout: Option<Duration>,
    pub stall_timeout: Option<Duration>,
    /// Probes, and the time after which a silent call gets a head.
    pub keep_alive: Option<Duration>,
    /// Its server is drained now and then, and starts again.
    pub drained: bool,
    /// Its events are stored.
    pub store: Option<Store>,
    /// The layer stands once before each method, and not before the route.
    pub by_method: bool,
    /// Beside the route itself: every session is served on all of them.
    pub more_paths: &'static [&'static str],
}

/// What a store gives out to a client that comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// What there is, and then the end: its client asks again and again.
    Replays,
    /// What there is and what comes, to every client that asks.
    Follows,
}

/// How long a call of a session waits for its client. Others are cancelled at once.
pub const GRACE: Micros = 2 * SECOND;
/// What clients are told to wait before they come back.
pub const RETRY: Duration = Duration::from_millis(300);
/// After this much idleness a session is closed. No call is silent for as long.
pub const IDLE: Duration = Duration::from_secs(10);
/// How long an answer is kept for a client that was away. It keeps its session.
pub const KEPT: Duration = Duration::from_secs(60);
/// How long the calls of a drained server may go on.
pub const DRAIN: Duration = Duration::from_millis(1_500);
/// How long rmcp lets the handlers of a deleted session go on, if nobody cancels them first.
pub const RMCP_DRAIN: Micros = 5 * SECOND;
/// How late after its time a call may be cancelled, on a machine that does not stall.
pub const MARGIN: Micros = SECOND;
/// A deadline that is noticed more than a second late is put off once, by this.
pub const REARMED: Micros = 5 * SECOND;
/// The end of a grace that is noticed late is looked at again after this.
pub const GLANCE: Micros = 100 * MILLI;
/// So often at most.
pub const MAX_GLANCES: u64 = 10;
/// Timers round, and clocks are read one after the other.
pub const EARLY: Micros = 20 * MILLI;

const PLAIN: Setup = Setup {
    route: "wrapped",
    sessions: true,
    wrapped: true,
    json: false,
    abort: None,
    call_timeout: None,
    stall_timeout: None,
    keep_alive: None,
    drained: false,
    store: None,
    by_method: false,
    more_paths: &[],
};

/// All of them.
pub const SETUPS: [Setup; 11] = [
    PLAIN,
    Setup {
        route: "layer",
        wrapped: false,
        ..PLAIN
    },
    Setup {
        route: "abort",
        abort: Some(Duration::from_millis(500)),
        ..PLAIN
    },
    Setup {
        route: "patient",
        call_timeout: Some(Duration::from_secs(4)),
        stall_timeout: Some(Duration::from_secs(1)),
        keep_alive: Some(Duration::from_millis(400)),
        ..PLAIN
    },
    Setup {
        route: "drained",
        drained: true,
        ..PLAIN
    },
    Setup {
        route: "replays",
        store: Some(Store::Replays),
        ..PLAIN
    },
    Setup {
        route: "follows",
        store: Some(Store::Follows),
        call_timeout: Some(Duration::from_secs(4)),
        ..PLAIN
    },
    Setup {
        route: "paths",
        by_method: true,
        more_paths: &["/other", "/third"],
        call_timeout: Some(Duration::from_secs(4)),
        ..PLAIN
    },
    Setup {
        route: "methods",
        wrapped: false,
        by_method: true,
        ..PLAIN
    },
    Setup {
        route: "stateless",
        sessions: false,
        wrapped: false,
        ..PLAIN
    },
    Setup {
        route: "json",
        sessions: false,
        wrapped: false,
        json: true,
        ..PLAIN
    },
];

// === impl Setup ===

impl Setup {
    /// The set-up of a route.
    #[must_use]
    pub fn of(route: &str) -> Option<&'static Self> {
        SETUPS.iter().find(|setup| setup.route == route)
    }

    /// Where it is served.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = String> {
        let route = self.route;
        let more = [""].iter().chain(self.more_paths);
        let paths: Vec<_> = more.map(|more| format!("/{route}{more}")).collect();
        paths.into_iter()
    }
}
