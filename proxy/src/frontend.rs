//! Accepts connections and refuses requests that must not reach the server.
//!
//! 1. A request's target must be a path, and its method must be `GET`, `POST`, `DELETE`, `OPTIONS` or `HEAD`. On HTTP/1, an
//!    absolute URI is refused, so that a request can't choose its server.
//! 2. `Host` must be one of this host's names. Otherwise, a website could make its own name resolve to this host and read all
//!    answers (DNS rebinding). Requests from pages with a foreign `Origin` are refused too.
//! 3. A request head may be up to 64 KiB long, and a client's body up to 4 MiB. A connection's first head must arrive within
//!    10 s, and a body must keep making progress. The number of connections and the total size of all bodies are also limited
//!    ([`FrontendLimits`]).
//! 4. Each request carries its connection's `Peer` in its extensions, so that a disconnect is detected even while hyper is not
//!    reading from the connection.
//! 5. An HTTP/2 request's `Cookie` fields are joined into one, as HTTP/1 requires.

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

/// Maximum size of a request head.
const MAX_HEAD: usize = 64 * 1024;

/// How long a connection's first request head may take before the connection is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may wait for a request head once the connection limit is reached.
///
/// This is also how often idle connections are checked.
const HEAD_TIMEOUT_IF_FULL: Duration = Duration::from_secs(1);

/// How long a connection may be idle after its first request.
///
/// Most clients and reverse proxies close an idle connection sooner than this (Caddy after 120 s, Go after 90 s, nginx after
/// 60 s). If the proxy closed it first, a POST sent at that very moment would be lost, because it must not be retried.
const IDLE_TIMEOUT: Duration = Duration::from_secs(130);

/// Maximum number of concurrent requests on an HTTP/2 connection.
///
/// This allows for the maximum number of open calls in a command's session, plus one cancellation or answer for each.
const MAX_HTTP2_REQUESTS: u32 = 2_048;

/// How many requests on an HTTP/2 connection may be reset before hyper has accepted them.
///
/// If there are more, the connection is closed, which ends all of its calls. hyper's default of 20 is too low: a reverse proxy
/// sends many clients' requests over one connection, and if this program stalls for a moment, the clients of all
/// [`MAX_HTTP2_REQUESTS`] may disconnect in the meantime. A client that resets requests on purpose takes up no more memory than
/// it could without resetting them.
const MAX_HTTP2_RESETS: usize = MAX_HTTP2_REQUESTS as usize;

/// How long a refused request's body is read before it is dropped.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of connections, no matter how many descriptors there are.
const MAX_CONNECTIONS: usize = 1 << 20;

/// The lifetime of a connection without a lifetime limit: about 136 years.
const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// How much longer than the stall timeout the kernel waits for a client to read.
///
/// This gives the layer time to close a stalled stream first.
const STALL_MARGIN: Duration = Duration::from_secs(30);

/// A listener with its filter and its limits.
#[derive(Debug)]
pub struct Frontend {
    listener: WatchedListener,
    filter: Arc<RequestFilter>,
    limits: FrontendLimits,
}

/// Limits on a listener's clients.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FrontendLimits {
    /// Maximum number of connections. Further connections wait until another closes.
    pub connections: usize,
    /// Maximum size of a request's body.
    pub body: usize,
    /// Maximum total size of the bodies being received. A request that would exceed it is refused with 503.
    pub bodies: usize,
    /// Maximum lifetime of a connection, or `None` for no limit. Requests in flight get another 500 ms.
    pub lifetime: Option<Duration>,
    /// How long a client may leave a stream unread, or `None` for no limit. The kernel closes the connection 30 s later.
    pub stall_timeout: Option<Duration>,
}

/// State shared by a listener's connections.
#[derive(Debug)]
struct Shared {
    filter: Arc<RequestFilter>,
    limits: FrontendLimits,
    capacity: Capacity,
    /// One permit per connection.
    permits: Arc<Semaphore>,
}

// === impl FrontendLimits ===

impl Default for FrontendLimits {
    /// Returns the default limits for clients.
    ///
    /// They allow bodies of up to 4 MiB, 64 MiB in total, and 1,048,576 connections of unlimited lifetime. The stall timeout is
    /// 60 s.
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
        // This skips socket options that the kernel does not support.
        let applied = dead_peer(limits.stall_timeout).apply(&listener)?;
        debug!("{applied}");
        Ok(Self {
            listener: WatchedListener::new(listener),
            filter: Arc::new(filter),
            limits,
        })
    }

    /// Returns the listener's address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` completes, then closes the connections.
    ///
    /// `stop` resolves to how long clients may still wait for answers and read them. Once no answer is in flight, the remaining
    /// connections are closed within 500 ms. A GET counts as having an answer in flight once its response has started; any
    /// other request counts as soon as its head has arrived.
    pub async fn serve(self, service: impl HttpService, stop: impl Future<Output = Duration>) {
        let (close, closed) = watch::channel(());
        let mut connections = JoinSet::new();
        // Each answer in flight holds a clone of this.
        let answers = Arc::new(());
        let mut stop = std::pin::pin!(stop);
        let shared = Arc::new(Shared {
            filter: self.filter,
            limits: self.limits,
            capacity: Capacity::new(self.limits.bodies),
            permits: Arc::new(Semaphore::new(self.limits.connections.min(MAX_CONNECTIONS))),
        });
        let mut was_full = false;
        let time_left = loop {
            let is_full = shared.is_full();
            if is_full && !was_full {
                let connections = self.limits.connections;
                warn!(
                    connections,
                    "connection limit reached, so new clients have to wait (raise ulimit -n; --admin has 64)"
                );
            }
            was_full = is_full;
            // The kernel queues further connections until there is a permit.
            let accepted = async {
                let permit = shared.permits.clone().acquire_owned().await;
                (permit, self.listener.accept().await)
            };
            tokio::select! {
                time_left = &mut stop => break time_left,
                (permit, (stream, _)) = accepted => {
                    let connection = serve_connection(
                        stream,
                        shared.clone(),
                        service.clone(),
                        Arc::downgrade(&answers),
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
        // This starts closing all connections gracefully.
        drop(close);
        let stopped = Instant::now();
        loop {
            let all_ended = async { while connections.join_next().await.is_some() {} };
            if timeout(CLOSE_TIMEOUT, all_ended).await.is_ok() {
                return;
            }
            let is_answering = Arc::strong_count(&answers) > 1;
            if !is_answering || stopped.elapsed() >= time_left {
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
/// `None` means no limit. To the kernel, a client that is not reading looks the same as a vanished one, so the kernel has to
/// wait longer than the layer does.
fn dead_peer(stall_timeout: Option<Duration>) -> DeadPeer {
    let user_timeout =
        stall_timeout.map_or(Duration::ZERO, |stall| stall.saturating_add(STALL_MARGIN));
    DeadPeer::new().user_timeout(user_timeout)
}

/// Serves a connection until it ends.
///
/// The connection is closed gracefully when the sender of `closed` is dropped, or when the connection has been idle or open for
/// too long. If an idle or overdue connection does not close in time, it is dropped.
async fn serve_connection(
    stream: WatchedStream,
    shared: Arc<Shared>,
    service: impl HttpService,
    answers: Weak<()>,
    mut closed: watch::Receiver<()>,
) {
    // Nagle's algorithm would delay small events.
    let _ = stream.tcp().set_nodelay(true);
    let peer = stream.peer();
    let in_flight = InFlight::default();
    let requests = in_flight.clone();
    let listener_state = shared.clone();
    let lifetime = shared.limits.lifetime.unwrap_or(UNLIMITED);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let in_flight_request = requests.start();
        request.extensions_mut().insert(peer.clone());
        let (shared, mut service, answers) = (shared.clone(), service.clone(), answers.clone());
        // Count a GET only once it has a response head, because some servers hold back a stream's head until its first event.
        let counted_early = answers
            .upgrade()
            .filter(|_| request.method() != Method::GET);
        async move {
            let response = respond(&shared, &mut service, request).await?;
            let guard = (
                in_flight_request,
                counted_early.or_else(|| answers.upgrade()),
            );
            Ok::<_, Infallible>(response.map(|body| with_guard(body, guard)))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // This timeout also applies to idle connections, but those are closed below before it expires.
        .header_read_timeout(IDLE_TIMEOUT + HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_HTTP2_REQUESTS)
        .max_pending_accept_reset_streams(MAX_HTTP2_RESETS)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    // Limit the wait for the first request head and the idle time between requests.
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
                    // Close gracefully, so that a request already on its way is answered or can be retried by its client.
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

/// Refuses a request that the filter rejects, or passes it on with a [`TimedBody`].
async fn respond(
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
        // A client that has sent `Expect` has not sent its body yet.
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

/// Reads and discards a refused request's body, for up to 5 s.
///
/// If a connection is closed while there are unread bytes, it is reset, and its client might not receive the refusal (RFC 9112,
/// section 9.6).
fn discard(mut body: Incoming) {
    let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
    tokio::spawn(timeout(DISCARD_TIMEOUT, rest));
}

/// Returns a body that holds `guard` until it is dropped.
fn with_guard(body: Body, guard: impl Send + 'static) -> Body {
    Body::new(body.map_err(move |error| {
        let _guard = &guard;
        error
    }))
}

/// Joins the `Cookie` fields into one.
///
/// This header may be split on HTTP/2, but not on HTTP/1 (RFC 9113, section 8.2.3).
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
