//! The socket options that detect a dead peer.
//!
//! Two options are needed. `SO_KEEPALIVE` probes an idle connection, but is suspended while sent data is unacknowledged.
//! `TCP_USER_TIMEOUT` limits how long sent data may remain unacknowledged, but on its own has no effect on an idle connection.
//! Without `SO_KEEPALIVE`, a dead peer on an idle connection is never detected. Without `TCP_USER_TIMEOUT`, a peer that does
//! not acknowledge data is detected only after the kernel's own retries, which take about 15 minutes by default.

#[cfg(unix)]
use std::os::fd::AsFd;
#[cfg(windows)]
use std::os::windows::io::AsSocket as AsFd;
use std::{fmt, io, time::Duration};

use socket2::{SockRef, TcpKeepalive};

/// Maximum user timeout, about 24 days. The kernel counts milliseconds in 31 bits.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const MAX_USER_TIMEOUT: Duration = Duration::from_millis(i32::MAX as u64);

/// Makes the kernel detect a dead peer, even if neither a FIN nor an RST arrives.
///
/// A peer is dead in this sense when, for example, a cable is pulled, a NAT drops the connection, or its machine loses power.
///
/// On Linux, apply the options once, to the listening socket, because accepted sockets inherit them. Elsewhere, apply them to
/// each accepted socket, for example with axum's `ListenerExt::tap_io`.
///
/// ```
/// use watched_socket::DeadPeer;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// let applied = DeadPeer::new().apply(&listener)?;
/// println!("{applied}");
/// # #[cfg(target_os = "linux")]
/// assert!(applied.is_complete());
/// # Ok(())
/// # }
/// ```
///
/// # Time to detection
///
/// Counted from the peer's last packet, a dead peer is detected after:
///
/// - idle + interval × probes if nothing is written, which is 90 s by default;
/// - *w* + user timeout + up to half a second for the first retransmission if something is written, where *w* is the time from
///   that packet to the next write. By default, a server that writes a keep-alive every 15 s detects a dead peer within 106 s.
///
/// Set the user timeout to idle + interval × probes. On Linux it overrides the number of probes, because the kernel gives up at
/// the first probe after the user timeout.
///
/// ```
/// use std::time::Duration;
/// use watched_socket::DeadPeer;
///
/// let seconds = Duration::from_secs;
/// let patient = DeadPeer::new().idle(seconds(60)).interval(seconds(20)).probes(3).user_timeout(seconds(120));
/// let applied = patient.apply(&std::net::TcpListener::bind("127.0.0.1:0")?)?;
/// assert!(applied.to_string().starts_with("keep-alive after 60s"));
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Why not shorter
///
/// The options cannot distinguish a dead peer from one that is merely unreachable for a while. In a test, a user timeout of 5 s
/// closed connections after an outage of only 4.5 s, even though the network was already back. It also closed the connections
/// of clients that had not read for 8 s. The defaults tolerate a network change, and clients paused for a minute by a debugger
/// or a closed laptop lid.
///
/// # Clients that are not reading
///
/// `TCP_USER_TIMEOUT` also runs while the peer's receive window is full, even though the peer acknowledges each probe. The
/// kernel therefore resets the connection of a client that is alive but has not read for that long, no matter how long the
/// server itself would wait. If the server has its own timeout for clients that are not reading, choose a longer user timeout.
/// If clients may pause for as long as they like, set the user timeout to zero. The kernel then gives up on unacknowledged data
/// after its own retries, which take about 15 min.
///
/// # HTTP/2
///
/// hyper's keep-alive pings do not replace these options. They do end a dead peer's streams, but the connection's task hangs in
/// its last write until the kernel gives up, so use both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "nothing is set until `apply` is called"]
pub struct DeadPeer {
    idle: Duration,
    interval: Duration,
    probes: u32,
    user_timeout: Duration,
}

/// The options set by [`DeadPeer::apply`].
///
/// `Display` formats them for the log, along with any that this platform does not support.
///
/// ```
/// use watched_socket::DeadPeer;
///
/// let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
/// let applied = DeadPeer::new().apply(&listener)?;
/// assert!(applied.to_string().starts_with("keep-alive after 30s"));
/// assert_eq!(applied.is_complete(), cfg!(any(target_os = "linux", target_os = "android", target_os = "fuchsia")));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    requested: DeadPeer,
    has_probes: bool,
    has_user_timeout: bool,
}

// === impl DeadPeer ===

impl DeadPeer {
    /// Returns the default options. [`DeadPeer`] has an example.
    ///
    /// With these, the kernel sends the first probe after 30 s of silence and another every 10 s, and gives up after six
    /// unanswered probes. It also gives up once sent data has been unacknowledged for 90 s.
    pub fn new() -> Self {
        Self {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            probes: 6,
            user_timeout: Duration::from_secs(90),
        }
    }

    /// Sets how long a connection may be silent before it is probed (`TCP_KEEPIDLE`).
    ///
    /// This is rounded up to whole seconds, with a minimum of one.
    ///
    /// ```
    /// use std::time::Duration;
    /// use watched_socket::DeadPeer;
    ///
    /// let rounded = DeadPeer::new().idle(Duration::from_millis(29_100));
    /// assert_eq!(rounded, DeadPeer::new());
    /// ```
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = round_up_to_seconds(idle);
        self
    }

    /// Sets the time between probes (`TCP_KEEPINTVL`).
    ///
    /// This is rounded up to whole seconds, with a minimum of one.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = round_up_to_seconds(interval);
        self
    }

    /// Sets the number of unanswered probes after which the kernel gives up (`TCP_KEEPCNT`).
    ///
    /// Linux accepts 1 to 127.
    pub fn probes(mut self, probes: u32) -> Self {
        self.probes = probes;
        self
    }

    /// Sets how long sent data may stay unacknowledged (`TCP_USER_TIMEOUT`).
    ///
    /// This also limits how long data may remain unsent while the peer's receive window is full. Zero means the kernel's own
    /// limit. Any other value is clamped to between 1 ms and 24 days.
    pub fn user_timeout(mut self, user_timeout: Duration) -> Self {
        self.user_timeout = user_timeout;
        self
    }

    /// Sets the options on a listening or connected TCP socket.
    ///
    /// Options that this platform does not support are skipped, which is not an error (see [`Applied`]).
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range for the kernel, or if the socket is not a TCP socket.
    #[allow(unused_mut, reason = "not every platform has all options")]
    pub fn apply(&self, socket: &impl AsFd) -> io::Result<Applied> {
        let socket = SockRef::from(socket);
        let mut keep_alive = TcpKeepalive::new().with_time(self.idle);
        let mut applied = Applied {
            requested: *self,
            has_probes: false,
            has_user_timeout: self.user_timeout.is_zero(),
        };
        #[cfg(any(
            target_vendor = "apple",
            target_os = "android",
            target_os = "freebsd",
            target_os = "fuchsia",
            target_os = "linux",
            target_os = "netbsd",
            target_os = "windows",
        ))]
        {
            keep_alive = keep_alive.with_interval(self.interval);
            keep_alive = keep_alive.with_retries(self.probes);
            applied.has_probes = true;
        }
        socket.set_tcp_keepalive(&keep_alive)?;
        // macOS (`TCP_RXT_CONNDROPTIME`) and Windows (`TCP_MAXRT`) have their own options, but socket2 does not support them.
        #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
        {
            // The kernel counts milliseconds and takes zero to mean its own limit, so a fraction of a millisecond becomes 1 ms.
            let limit = self
                .user_timeout
                .clamp(Duration::from_millis(1), MAX_USER_TIMEOUT);
            let limit = (!self.user_timeout.is_zero()).then_some(limit);
            socket.set_tcp_user_timeout(limit)?;
            applied.requested.user_timeout = limit.unwrap_or_default();
            applied.has_user_timeout = true;
        }
        Ok(applied)
    }
}

impl Default for DeadPeer {
    fn default() -> Self {
        Self::new()
    }
}

/// Rounds up, because fractions of a second would be truncated, and zero would be rejected.
fn round_up_to_seconds(time: Duration) -> Duration {
    let fraction = u64::from(time.subsec_nanos() > 0);
    Duration::from_secs(time.as_secs().saturating_add(fraction).max(1))
}

// === impl Applied ===

impl Applied {
    /// Returns `true` if all requested options are set.
    pub fn is_complete(&self) -> bool {
        self.has_probes && self.has_user_timeout
    }
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requested = &self.requested;
        write!(f, "keep-alive after {:?}, ", requested.idle)?;
        if self.has_probes {
            write!(
                f,
                "every {:?}, {} probes; ",
                requested.interval, requested.probes
            )?;
        } else {
            f.write_str("interval and number of probes as set by the platform; ")?;
        }
        if !self.has_user_timeout {
            return f.write_str(
                "no user timeout: this platform has no TCP_USER_TIMEOUT, so a dead peer may go unnoticed for \
                 minutes while sent data is unacknowledged",
            );
        }
        match requested.user_timeout {
            Duration::ZERO => f.write_str("the kernel's own user timeout"),
            limit => write!(f, "user timeout {limit:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn accepted_by(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let addr = listener.local_addr().expect("bound");
        let client = TcpStream::connect(addr).expect("connect");
        (listener.accept().expect("accept").0, client)
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").expect("bind a free port")
    }

    #[test]
    fn no_extreme_of_an_option_panics() {
        let durations = [
            Duration::ZERO,
            Duration::from_nanos(1),
            Duration::from_millis(1),
            Duration::MAX,
        ];
        let setters: [fn(DeadPeer, Duration) -> DeadPeer; 4] = [
            DeadPeer::idle,
            DeadPeer::interval,
            DeadPeer::user_timeout,
            |options, number| options.probes(number.as_nanos().try_into().unwrap_or(u32::MAX)),
        ];
        for first in setters {
            for second in setters {
                for (first_value, second_value) in durations
                    .into_iter()
                    .flat_map(|a| durations.map(|b| (a, b)))
                {
                    let options = second(first(DeadPeer::new(), first_value), second_value);
                    match options.apply(&listener()) {
                        Ok(applied) => assert!(applied.to_string().contains("keep-alive")),
                        // The kernel rejects out-of-range numbers.
                        Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
                    }
                }
            }
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_accepted_socket_inherits_the_options_of_the_listening_one() {
        let listener = listener();
        let requested = DeadPeer::new()
            .idle(Duration::from_secs(7))
            .interval(Duration::from_secs(2))
            .probes(4)
            .user_timeout(Duration::from_millis(15_500));
        let applied = requested.apply(&listener).expect("apply");
        assert!(applied.is_complete());

        let (accepted, _client) = accepted_by(&listener);
        let socket = SockRef::from(&accepted);
        let read_back = DeadPeer {
            idle: socket.tcp_keepalive_time().expect("idle"),
            interval: socket.tcp_keepalive_interval().expect("interval"),
            probes: socket.tcp_keepalive_retries().expect("probes"),
            user_timeout: socket.tcp_user_timeout().expect("limit").expect("a limit"),
        };
        assert!(socket.keepalive().expect("keep-alive"));
        assert_eq!(read_back, requested);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_options_can_be_set_on_a_single_accepted_socket() {
        let (accepted, _client) = accepted_by(&listener());
        DeadPeer::new().apply(&accepted).expect("apply");
        let socket = SockRef::from(&accepted);
        assert!(socket.keepalive().expect("keep-alive"));
        let limit = socket.tcp_user_timeout().expect("limit");
        assert_eq!(limit, Some(Duration::from_secs(90)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_fraction_of_the_kernels_unit_is_rounded_up() {
        let (accepted, _client) = accepted_by(&listener());
        DeadPeer::new()
            .idle(Duration::from_millis(1_001))
            .interval(Duration::ZERO)
            .user_timeout(Duration::from_nanos(1))
            .apply(&accepted)
            .expect("apply");
        let socket = SockRef::from(&accepted);
        let idle = socket.tcp_keepalive_time().expect("idle");
        let interval = socket.tcp_keepalive_interval().expect("interval");
        let limit = socket.tcp_user_timeout().expect("limit");
        assert_eq!(idle, Duration::from_secs(2));
        assert_eq!(interval, Duration::from_secs(1));
        assert_eq!(limit, Some(Duration::from_millis(1)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_option_that_the_kernel_refuses_is_an_error() {
        let refused = DeadPeer::new().probes(1_000).apply(&listener());
        let error = refused.expect_err("at most 127 probes");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_log_line_names_what_the_platform_lacks() {
        let requested = DeadPeer::new();
        let everything = Applied {
            requested,
            has_probes: true,
            has_user_timeout: true,
        };
        let line = "keep-alive after 30s, every 10s, 6 probes; user timeout 90s";
        assert_eq!(everything.to_string(), line);

        let without_user_timeout = Applied {
            has_user_timeout: false,
            ..everything
        };
        assert!(!without_user_timeout.is_complete());
        assert!(
            without_user_timeout
                .to_string()
                .contains("this platform has no TCP_USER_TIMEOUT")
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_log_line_has_the_user_timeout_that_the_kernel_uses() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        for requested in [Duration::from_micros(1), Duration::MAX] {
            let requested = DeadPeer::new().user_timeout(requested);
            let applied = requested.apply(&listener).expect("apply").to_string();
            let socket = SockRef::from(&listener);
            let limit = socket.tcp_user_timeout().expect("limit").expect("a limit");
            assert!(
                applied.ends_with(&format!("user timeout {limit:?}")),
                "{applied}"
            );
        }
    }
}
