//! Distributes this process's file descriptors among sessions and connections.
//!
//! A command's sessions have priority, because a session keeps its process even after its connections have been closed.
//! Connections only get a share of the descriptors. That way, a client with many connections can't keep other clients'
//! processes from starting or their upstream connections from being opened.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of descriptors reserved for the program itself.
///
/// The listeners, the runtime and the standard streams need some, and so does a process being started.
const RESERVED: usize = 48;

/// Number of descriptors per session.
///
/// A session's process has three pipes. It only needs more while it is starting.
const PER_SESSION: usize = 4;

/// Number of client connections that the raised limit allows for.
const CONNECTIONS: usize = 4_096;

/// How this process's descriptors are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptors {
    /// Maximum number of descriptors that this process can have open.
    limit: usize,
    sessions: usize,
    is_upstream: bool,
}

// === impl Descriptors ===

impl Descriptors {
    /// Raises this process's soft limit as far as needed and allowed.
    ///
    /// `sessions` is `None` if the server is an upstream.
    pub(crate) fn raise(sessions: Option<usize>) -> Self {
        let is_upstream = sessions.is_none();
        let sessions = sessions.unwrap_or(0);
        // Assume one upstream connection per client connection.
        let for_connections = if is_upstream { 2 } else { 1 } * CONNECTIONS;
        let wanted = sessions.saturating_mul(PER_SESSION);
        let wanted = wanted.saturating_add(RESERVED + for_connections);
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        // `None` means unlimited.
        let to_usize = |limit: Option<u64>| {
            limit.map_or(usize::MAX, |limit| limit.try_into().unwrap_or(usize::MAX))
        };
        let raised = wanted.min(to_usize(maximum)).max(to_usize(current));
        let new_limits = Rlimit {
            current: raised.try_into().ok(),
            maximum,
        };
        let is_raised =
            raised > to_usize(current) && setrlimit(Resource::Nofile, new_limits).is_ok();
        Self {
            limit: if is_raised { raised } else { to_usize(current) },
            sessions,
            is_upstream,
        }
    }

    /// Returns the maximum number of client connections, which is at least 1.
    ///
    /// For an upstream, this is half of the descriptors. For a command, it is whatever remains after the sessions' share, but
    /// at least a quarter of the descriptors.
    pub(crate) fn connections(self) -> usize {
        let available = self.limit.saturating_sub(RESERVED);
        if self.is_upstream {
            return (available / 2).max(1);
        }
        let beside_sessions = available.saturating_sub(self.sessions.saturating_mul(PER_SESSION));
        beside_sessions.max(available / 4).max(1)
    }

    /// Returns how many sessions the descriptors suffice for, or `None` if they suffice for all.
    pub(crate) fn session_limit(self) -> Option<usize> {
        let available = self.limit.saturating_sub(RESERVED + self.connections());
        let fits = available / PER_SESSION;
        (fits < self.sessions).then_some(fits)
    }

    pub(crate) fn limit(self) -> usize {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors(limit: usize, sessions: usize) -> Descriptors {
        Descriptors {
            limit,
            sessions,
            is_upstream: false,
        }
    }

    #[test]
    fn sessions_take_precedence_over_connections_which_keep_a_quarter() {
        let many = descriptors(RESERVED + 4 * 256 + 1_000, 256);
        assert_eq!((many.connections(), many.session_limit()), (1_000, None));
        let few = descriptors(1_024, 256);
        assert_eq!((few.connections(), few.session_limit()), (244, Some(183)));
        let none = descriptors(10, 256);
        assert_eq!((none.connections(), none.session_limit()), (1, Some(0)));
    }

    #[test]
    fn each_client_connection_has_one_to_the_upstream() {
        let upstream = Descriptors {
            limit: RESERVED + 100,
            sessions: 0,
            is_upstream: true,
        };
        assert_eq!(
            (upstream.connections(), upstream.session_limit()),
            (50, None)
        );
    }
}
