//! The set-ups of the server and their promises. The server is built from them, and the referee judges by them.

use std::time::Duration;

use crate::clock::{MILLI, Micros, SECOND};

/// A route of the server under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub route: &'static str,
    /// Clients have sessions, except with 2026-07-28.
    pub has_sessions: bool,
    /// The session manager is wrapped in a `CancellableSessionManager`.
    pub is_wrapped: bool,
    /// Answers with JSON where rmcp can.
    pub answers_json: bool,
    /// Time for which a handler may continue without reacting to its token.
    pub abort: Option<Duration>,
    pub call_timeout: Option<Duration>,
    pub stall_timeout: Option<Duration>,
    /// Interval of probes, and time after which a silent call receives a head.
    pub keep_alive: Option<Duration>,
    /// Its server is occasionally drained and started again.
    pub is_drained: bool,
    /// Its events are stored.
    pub store: Option<Store>,
    /// The layer is added to each method separately, not to the route.
    pub layers_each_method: bool,
    /// Additional paths. Every session is served on all paths.
    pub more_paths: &'static [&'static str],
}

/// The response of a store to a client that resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// The stored events, and then the end. The client resumes repeatedly.
    Replays,
    /// The stored and all later events, to every client that resumes.
    Follows,
}

/// Grace of a session call. Other calls are cancelled immediately.
pub const GRACE: Micros = 2 * SECOND;
/// The reconnect delay that is sent to clients.
pub const RETRY: Duration = Duration::from_millis(300);
/// Idle timeout of a session. No call is silent for as long.
pub const IDLE: Duration = Duration::from_secs(10);
/// Time for which an answer is retained for a client that was disconnected. The session stays open in the meantime.
pub const RETENTION: Duration = Duration::from_secs(60);
/// Maximum time for calls of a drained server to complete.
pub const DRAIN: Duration = Duration::from_millis(1_500);
/// Maximum time for which rmcp lets the handlers of a deleted session run on, if they are not cancelled first.
pub const RMCP_DRAIN: Micros = 5 * SECOND;
/// Maximum delay of a cancel on a machine that does not stall.
pub const MARGIN: Micros = SECOND;
/// Time by which a deadline is postponed, once, if it is noticed more than a second late.
pub const POSTPONE_TIME: Micros = 5 * SECOND;
/// Time after which the end of a grace is checked again if it was noticed late.
pub const RECHECK_DELAY: Micros = 100 * MILLI;
/// Maximum number of such checks.
pub const MAX_RECHECKS: u64 = 10;
/// Tolerance for early cancels, because timers are rounded and clocks are read one after the other.
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
    /// Returns the set-up of a route, or `None` if there is no such route.
    #[must_use]
    pub fn of(route: &str) -> Option<&'static Self> {
        SETUPS.iter().find(|setup| setup.route == route)
    }

    /// Returns the paths at which the set-up is served.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = String> {
        let route = self.route;
        let more = [""].iter().chain(self.more_paths);
        let paths: Vec<_> = more.map(|more| format!("/{route}{more}")).collect();
        paths.into_iter()
    }
}
