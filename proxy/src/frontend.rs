//! Accepts connections and refuses requests that must not reach the server.
//!
//! 1. The target of a request must be a path, and its method must be `GET`, `POST`, `DELETE`, `OPTIONS` or `HEAD`. An absolute URI on
//!    HTTP/1 is refused, so a request cannot choose its server.
//! 2. `Host` must be a name of this host. Otherwise a website could make its own name resolve to this host and read
//!    all answers (DNS rebinding). Requests from pages of a foreign `Origin` are refused as well.
//! 3. The head of a request is limited to 64 KiB, and a client's body to 4 MiB. The first head of a connection must arrive within 10 s.
//!    A body must make progress. The number of connections and the size of all bodies together are limited as well ([`FrontendLimits`]).
//! 4. The extensions of each request contain the `Peer` of its connection, so that a disconnect is detected even while hyper
//!    is not reading.
//! 5. The `Cookie` fields of an HTTP/2 request are joined into one, as HTTP/1 requires.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use mcp_cancel_on_disconnect::socket::{DeadPeer, WatchedListener, WatchedStream};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, warn};

use self::{
    body::{Capacity, TimedBody},
    in_flight::InFlight,
};
use crate::{drain::CLOSE_TIMEOUT, http_service::HttpService, message::MAX_BODY, refusal};

mod body;
mod in_flight;
mod request_filter;

pub use self::request_filter::RequestFilter;

/// Maximum size of the head of a request: 64 KiB.
const MAX_HEAD: usize = 64 * 1024;

/// Time for the first head of a connection to arrive: 10 s. Otherwise the connection is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may wait for a head while the connection limit is reached: 1 s.
///
/// Also the interval at which idle connections are checked.
const HEAD_TIMEOUT_IF_FULL: Duration = Duration::from_secs(1);

/// How long a connection may be idle after its first request: 130 s.
///
/// Longer than most clients and reverse proxies keep an idle connection (Caddy 120 s, Go 90 s, nginx 60 s). If the proxy
/// closed one first, a POST sent at the same moment would be lost, because it must not be repeated.
const IDLE_TIMEOUT: Duration = Duration::from_secs(130);

/// Maximum number of concurrent requests on an HTTP/2 connection: 2,048.
///
/// Chosen as the maximum number of open calls of a command's session, plus one cancel or answer for each.
const MAX_HTTP2_REQUESTS: u32 = 2_048;

/// Maximum number of requests on an HTTP/2 connection that are reset before hyper has accepted them: 2,048.
///
/// Above it, the connection ends with all its calls. A reverse proxy has the requests of many clients on one connection. If the program
/// stands still for a moment, all clients of [`MAX_HTTP2_REQUESTS`] may disconnect in the meantime. hyper's default is 20. A client
/// that resets its requests on purpose takes no more memory than with as many that it does not reset.
const MAX_HTTP2_RESETS: usize = MAX_HTTP2_REQUESTS as usize;

/// How long the body of a refused request is read: 5 s.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of connections, however many descriptors there are: 1,048,576.
const MAX_CONNECTIONS: usize = 1 << 20;

/// The lifetime used if connections have no lifetime limit: `u32::MAX` seconds, about 136 years.
const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// How much longer than the stall timeout the kernel waits for a client to read: 30 s.
///
/// Chosen so that the layer closes a stalled stream first.
const STALL_MARGIN: Duration = Duration::from_secs(30);

/// A listener with its filter and its limits.
#[derive(Debug)]
pub struct Frontend {
    listener: WatchedListener,
    filter: Arc<RequestFilter>,
    limits: FrontendLimits,
}

/// Limits for the clients of a listener.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FrontendLimits {
    /// Maximum number of connections. Further connections wait until one closes.
    pub connections: usize,
    /// Maximum size of a request's body.
    pub body: usize,
    /// Maximum total size of the bodies that are being received. A request that would exceed it gets 503.
    pub bodies: usize,
    /// Maximum lifetime of a connection. `None` means no limit. Requests in flight may take `CLOSE_TIMEOUT` longer.
    pub lifetime: Option<Duration>,
    /// How long a client may leave a stream unread. `None` means no limit. The kernel closes a connection 30 s later.
    pub stall_timeout: Option<Duration>,
}

/// State shared by the connections of a listener.
#[derive(Debug)]
struct Shared {
    filter: Arc<RequestFilter>,
    limits: FrontendLimits,
    capacity: Capacity,
    /// One permit for each connection.
    permits: Arc<Semaphore>,
}

// === impl FrontendLimits ===

impl Default for FrontendLimits {
    /// Returns the limits for clients.
    ///
    /// Bodies of 4 MiB, 64 MiB in total, 1,048,576 connections, no lifetime limit, and a stall timeout of 60 s.
    fn default() -> Self {
        Self {
            connections: MAX_CONNECTIONS,
            body: MAX_BODY,
            bodies: 16 * MAX_BODY,
            lifetime: None,
            stall_timeout: Some(Duration::from_secs(60)),
        }
    }
}

// === impl Frontend ===

impl Frontend {
    /// Listens on an address.
    pub async fn bind(
        address: SocketAddr,
        filter: RequestFilter,
        limits: FrontendLimits,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        // Socket options that the kernel does not support are skipped.
        let applied = dead_peer(limits.stall_timeout).apply(&listener)?;
        debug!("{applied}");
        Ok(Self {
            listener: WatchedListener::new(listener),
            filter: Arc::new(filter),
            limits,
        })
    }

    /// Returns the address of the listener.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` completes, then closes the connections.
    ///
    /// The output of `stop` is how long clients may still wait for answers and read them. Once no answer is in flight, the
    /// remaining connections are closed within 500 ms. A GET counts as an answer once its response has started, any other
    /// request as soon as its head has arrived.
    pub async fn serve(self, service: impl HttpService, stop: impl Future<Output = Duration>) {
        let (close, closed) = watch::channel(());
        let mut connections = JoinSet::new();
        // Each answer in flight holds a clone.
        let answering = Arc::new(());
        let mut stop = std::pin::pin!(stop);
        let shared = Arc::new(Shared {
            filter: self.filter,
            limits: self.limits,
            capacity: Capacity::new(self.limits.bodies),
            permits: Arc::new(Semaphore::new(self.limits.connections.min(MAX_CONNECTIONS))),
        });
        let mut was_full = false;
        let closing = loop {
            let is_full = shared.is_full();
            if is_full && !was_full {
                let connections = self.limits.connections;
                warn!(
                    connections,
                    "connection limit reached, new clients wait (raise ulimit -n; --admin has 64)"
                );
            }
            was_full = is_full;
            // The kernel queues other connections until there is a permit.
            let accepted = async {
                let permit = shared.permits.clone().acquire_owned().await;
                (permit, self.listener.accept().await)
            };
            tokio::select! {
                closing = &mut stop => break closing,
                (permit, (stream, _)) = accepted => {
                    let connection = connection(
                        stream,
                        shared.clone(),
                        service.clone(),
                        Arc::downgrade(&answering),
                        closed.clone(),
                    );
                    connections.spawn(async move {
                        let _permit = permit;
                        connection.await;
                    });
                }
                Some(_ended) = connections.join_next() => {}
            }
        };
        drop(self.listener);
        drop(close);
        let stopped = Instant::now();
        loop {
            let all_ended = async { while connections.join_next().await.is_some() {} };
            if timeout(CLOSE_TIMEOUT, all_ended).await.is_ok() {
                return;
            }
            let is_answering = Arc::strong_count(&answering) > 1;
            if !is_answering || stopped.elapsed() >= closing {
                debug!(
                    connections = connections.len(),
                    "closing the remaining connections"
                );
                return;
            }
        }
    }
}

// === impl Shared ===

impl Shared {
    fn is_full(&self) -> bool {
        self.permits.available_permits() == 0
    }
}

/// Returns the socket options for clients that may leave a stream unread for `stall_timeout`.
///
/// `None` means no limit. The kernel cannot distinguish a client that is not reading from one that has vanished, so the kernel
/// must wait longer than the layer.
fn dead_peer(stall_timeout: Option<Duration>) -> DeadPeer {
    let user_timeout =
        stall_timeout.map_or(Duration::ZERO, |stall| stall.saturating_add(STALL_MARGIN));
    DeadPeer::new().user_timeout(user_timeout)
}

/// Serves a connection until it ends.
///
/// The connection is closed gracefully once the sender of `closed` is dropped, or once it has been idle or open for too long. An idle
/// or overdue connection that does not close in time is dropped.
async fn connection(
    stream: WatchedStream,
    shared: Arc<Shared>,
    service: impl HttpService,
    answering: Weak<()>,
    mut closed: watch::Receiver<()>,
) {
    // Nagle's algorithm would delay small events.
    let _best_effort = stream.tcp().set_nodelay(true);
    let peer = stream.peer();
    let in_flight = InFlight::default();
    let requests = in_flight.clone();
    let listener_state = shared.clone();
    let lifetime = shared.limits.lifetime.unwrap_or(UNLIMITED);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let in_flight_request = requests.start();
        request.extensions_mut().insert(peer.clone());
        let (shared, mut service, answering) = (shared.clone(), service.clone(), answering.clone());
        // A GET counts only once it has a response head, because some servers delay the head of a stream until its first event.
        let counted_early = answering
            .upgrade()
            .filter(|_| request.method() != Method::GET);
        async move {
            let answer = answer(&shared, &mut service, request).await?;
            let guard = (
                in_flight_request,
                counted_early.or_else(|| answering.upgrade()),
            );
            Ok::<_, Infallible>(answer.map(|body| with_guard(body, guard)))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // Also runs on an idle connection, which is closed below.
        .header_read_timeout(IDLE_TIMEOUT + HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_HTTP2_REQUESTS)
        .max_pending_accept_reset_streams(MAX_HTTP2_RESETS)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    // Bounds the wait for the first head and the idle time between requests.
    let mut check = std::pin::pin!(sleep(HEAD_TIMEOUT_IF_FULL));
    let mut idle_until = Instant::now() + HEAD_TIMEOUT;
    let mut lifetime_end = std::pin::pin!(sleep(lifetime));
    let mut started_before = 0;
    let (mut is_idle, mut is_open) = (true, true);
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    debug!(%error, "connection");
                }
                return;
            }
            () = &mut check, if is_idle => {
                let now = Instant::now();
                if in_flight.started() != started_before {
                    started_before = in_flight.started();
                    idle_until = now + IDLE_TIMEOUT;
                }
                is_idle = in_flight.is_empty();
                if is_idle && (now >= idle_until || listener_state.is_full()) {
                    if !is_open {
                        return;
                    }
                    // With a graceful shutdown, a request that is already on its way is answered, or the client may retry it.
                    is_open = false;
                    connection.as_mut().graceful_shutdown();
                }
                check.as_mut().reset(now + HEAD_TIMEOUT_IF_FULL);
            }
            () = in_flight.wait_until_empty(), if !is_idle => {
                let now = Instant::now();
                is_idle = true;
                idle_until = now + IDLE_TIMEOUT;
                check.as_mut().reset(now + HEAD_TIMEOUT_IF_FULL);
            }
            _closed = closed.changed(), if is_open => {
                is_open = false;
                connection.as_mut().graceful_shutdown();
            }
            () = &mut lifetime_end => {
                if !is_open {
                    return;
                }
                is_open = false;
                connection.as_mut().graceful_shutdown();
                lifetime_end.as_mut().reset(Instant::now() + CLOSE_TIMEOUT);
            }
        }
    }
}

/// Refuses a request that the filter rejects. Passes any other one to the service, with a [`TimedBody`].
async fn answer(
    shared: &Shared,
    service: &mut impl HttpService,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (mut parts, body) = request.into_parts();
    if let Err((status, text)) = shared.filter.check(&parts, shared.limits.body) {
        let mut refused = refusal::plain(status, text);
        if status == StatusCode::METHOD_NOT_ALLOWED {
            let allow = HeaderValue::from_static(request_filter::ALLOW);
            refused.headers_mut().insert(header::ALLOW, allow);
        }
        // A client that sent `Expect` waits before it sends the body.
        if !parts.headers.contains_key(header::EXPECT) {
            discard(body);
        }
        return Ok(refused);
    }
    if parts.version == Version::HTTP_2 {
        join_cookies(&mut parts.headers);
    }
    let body = TimedBody::new(body, shared.limits.body, shared.capacity.clone());
    let request = Request::from_parts(parts, Body::new(body));
    std::future::poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}

/// Reads the body of a refused request, for at most 5 s.
///
/// A connection that is closed with unread bytes is reset, and its client may lose the refusal (RFC 9112, section 9.6).
fn discard(mut body: Incoming) {
    let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
    tokio::spawn(timeout(DISCARD_TIMEOUT, rest));
}

/// Returns a body that holds `guard` until the body is dropped.
fn with_guard(body: Body, guard: impl Send + 'static) -> Body {
    Body::new(body.map_err(move |error| {
        let _guard = &guard;
        error
    }))
}

/// Joins the `Cookie` fields into one.
///
/// HTTP/2 may split the header, and HTTP/1 may not (RFC 9113, section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let fields = headers.get_all(header::COOKIE).iter();
    let fields: Vec<&[u8]> = fields.map(HeaderValue::as_bytes).collect();
    if fields.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&fields.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, joined);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_timeout_exceeds_the_stall_timeout() {
        let minute = Duration::from_secs(60);
        for stall in [Duration::from_secs(1), minute, 10 * minute] {
            let expected = DeadPeer::new().user_timeout(stall + STALL_MARGIN);
            assert_eq!(dead_peer(Some(stall)), expected);
        }
        assert_eq!(
            dead_peer(Some(minute)),
            DeadPeer::new(),
            "the default user timeout fits the default stall timeout"
        );
    }

    #[test]
    fn without_a_stall_timeout_there_is_no_user_timeout() {
        assert_eq!(
            dead_peer(None),
            DeadPeer::new().user_timeout(Duration::ZERO)
        );
    }
}
