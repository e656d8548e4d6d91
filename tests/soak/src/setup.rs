//! The server's set-ups and what they promise. The server is built from them, and the referee judges by them.

use std::time::Duration;

use crate::clock::{MILLI, Micros, SECOND};

/// A route of the server under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub route: &'static str,
    /// Whether clients have sessions, which is never the case with 2026-07-28.
    pub has_sessions: bool,
    /// Whether the session manager is wrapped in a `CancellableSessionManager`.
    pub is_wrapped: bool,
    /// Whether answers are JSON where rmcp can do that.
    pub answers_json: bool,
    /// How long a handler may go on without reacting to its token.
    pub abort: Option<Duration>,
    pub call_timeout: Option<Duration>,
    pub stall_timeout: Option<Duration>,
    /// How often streams are probed, and how long a call may be silent before it gets a head.
    pub keep_alive: Option<Duration>,
    /// Whether its server is drained and restarted now and then.
    pub is_drained: bool,
    /// The store that keeps its events, if any.
    pub store: Option<Store>,
    /// Whether the layer is added to each method separately rather than to the route.
    pub layers_each_method: bool,
    /// Additional paths. Every session is served on all paths.
    pub more_paths: &'static [&'static str],
}

/// How a store responds to a client that resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// With the stored events, after which the stream ends. The client keeps resuming.
    Replays,
    /// With the stored events and all later ones, for every client that resumes.
    Follows,
}

/// The grace period of a session call. Other calls are cancelled immediately.
pub const GRACE: Micros = 2 * SECOND;
/// The reconnect delay that clients are asked to use.
pub const RETRY: Duration = Duration::from_millis(300);
/// A session's idle timeout. No call is silent for that long.
pub const IDLE: Duration = Duration::from_secs(10);
/// How long an answer is retained for a client that has disconnected. The session stays open in the meantime.
pub const RETENTION: Duration = Duration::from_secs(60);
/// How long a drained server's calls have to complete.
pub const DRAIN: Duration = Duration::from_millis(1_500);
/// How long rmcp lets a deleted session's handlers run on, unless they are cancelled first.
pub const RMCP_DRAIN: Micros = 5 * SECOND;
/// How late a cancellation may be on a machine that does not stall.
pub const MARGIN: Micros = SECOND;
/// How far a deadline is postponed, once, if it is noticed more than a second late.
pub const POSTPONE_TIME: Micros = 5 * SECOND;
/// How long until a grace period that was noticed late to have ended is checked again.
pub const RECHECK_DELAY: Micros = 100 * MILLI;
/// How many such checks there are at most.
pub const MAX_RECHECKS: u64 = 10;
/// How early a cancellation may be. Timers are rounded, and clocks are not read at the same time.
pub const EARLY_TOLERANCE: Micros = 20 * MILLI;

const PLAIN: Setup = Setup {
    route: "wrapped",
    has_sessions: true,
    is_wrapped: true,
    answers_json: false,
    abort: None,
    call_timeout: None,
    stall_timeout: None,
    keep_alive: None,
    is_drained: false,
    store: None,
    layers_each_method: false,
    more_paths: &[],
};

/// All set-ups.
pub const SETUPS: [Setup; 11] = [
    PLAIN,
    Setup {
        route: "layer",
        is_wrapped: false,
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
        is_drained: true,
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
        layers_each_method: true,
        more_paths: &["/other", "/third"],
        call_timeout: Some(Duration::from_secs(4)),
        ..PLAIN
    },
    Setup {
        route: "methods",
        is_wrapped: false,
        layers_each_method: true,
        ..PLAIN
    },
    Setup {
        route: "stateless",
        has_sessions: false,
        is_wrapped: false,
        ..PLAIN
    },
    Setup {
        route: "json",
        has_sessions: false,
        is_wrapped: false,
        answers_json: true,
        ..PLAIN
    },
];

// === impl Setup ===

impl Setup {
    /// Returns a route's set-up, or `None` if there is no such route.
    #[must_use]
    pub fn of(route: &str) -> Option<&'static Self> {
        SETUPS.iter().find(|setup| setup.route == route)
    }

    /// Returns the paths that the set-up is served at.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = String> {
        let route = self.route;
        let more = [""].iter().chain(self.more_paths);
        let paths: Vec<_> = more.map(|more| format!("/{route}{more}")).collect();
        paths.into_iter()
    }
}
