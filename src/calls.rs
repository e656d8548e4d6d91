//! A handle for listing, cancelling and draining a layer's calls.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    call::{CallId, CallInfo, CancelReason, LISTEN, RequestId},
    exchange::{Cancel, Exchange, Registry},
    observe::{CallSnapshot, CallState},
    registry::Entry,
    wait_until::wait_until,
};

/// Maximum time a drain waits for servers to accept its cancellations.
///
/// Cancellations that take longer are not aborted, and may still be accepted until the process exits.
const DRAIN_ACCEPT_TIMEOUT: Duration = Duration::from_secs(1);

/// A handle to the in-flight calls of a layer and its clones.
///
/// ```
/// use axum::{Router, body::{Body, Bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancelReason, RequestId};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let layer = CancelOnDisconnectLayer::new();
/// let calls = layer.calls();
/// let app: Router = Router::new()
///     .route("/mcp", post(async |_: Bytes| std::future::pending::<()>().await))
///     .layer(layer);
/// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
/// let request = Request::post("/mcp")
///     .header("content-type", "application/json")
///     .header("mcp-session-id", "a session");
/// let mut response = Box::pin(app.oneshot(request.body(Body::from(call)).unwrap()));
/// assert!(futures_util::poll!(&mut response).is_pending());
///
/// let call = calls.find("a session", &RequestId::Number(7)).unwrap();
/// assert_eq!((calls.len(), calls.in_session("a session"), calls.detached()), (1, 1, 0));
/// assert_eq!(calls.snapshot()[0].info().tool(), Some("upload"));
/// assert!(calls.cancel(call, CancelReason::Requested));
/// assert!(calls.is_empty());
/// # }
/// ```
#[derive(Clone)]
pub struct Calls {
    registry: Arc<Registry>,
}

/// The result of a [drain](Calls::drain).
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let calls = CancelOnDisconnectLayer::new().calls();
/// let report = calls.drain(Duration::from_secs(30)).await; // returns at once, because nothing is in flight
/// assert_eq!((report.ended, report.cancelled), (0, 0));
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DrainReport {
    /// Number of calls that ended without a cancellation while the drain was waiting.
    ///
    /// A call that was cancelled in the meantime, whether by its client or for any other reason, is not counted.
    pub ended: usize,
    /// Number of calls cancelled by the drain.
    pub cancelled: usize,
}

/// The part of a snapshot that has to be copied while the session is locked. The rest is copied afterwards.
struct RawSnapshot {
    id: CallId,
    exchange: Arc<Exchange>,
    detached_at: Option<Instant>,
    grace_deadline: Option<Instant>,
    deadline: Option<Instant>,
}

// === impl Calls ===

impl Calls {
    pub(crate) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }

    /// Returns the number of calls in flight, attached or detached.
    pub fn len(&self) -> usize {
        self.registry.len()
    }

    /// Returns `true` if no call is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of detached calls, which are in flight but have no open stream.
    pub fn detached(&self) -> usize {
        self.registry.detached()
    }

    /// Returns the number of a session's in-flight calls.
    pub fn in_session(&self, session: &str) -> usize {
        self.registry
            .with_session(session, |state| state.len())
            .unwrap_or(0)
    }

    /// Returns the in-flight calls and their current states, oldest first.
    pub fn snapshot(&self) -> Vec<CallSnapshot> {
        let now = Instant::now();
        let snapshots = self
            .registry
            .scan_calls(|id, entry| Some(RawSnapshot::new(id, entry)));
        let mut calls: Vec<_> = snapshots.filter_map(|raw| raw.snapshot(now)).collect();
        calls.sort_unstable_by_key(|call| call.info.id());
        calls
    }

    /// Returns the session's in-flight call with this JSON-RPC id.
    ///
    /// Returns `None` if there is none, or if there are several because two servers behind the layer have issued the same session id.
    pub fn find(&self, session: &str, request: &RequestId) -> Option<CallId> {
        let call = self
            .registry
            .with_session(session, |state| state.find_unique(request));
        call.flatten()
    }

    /// Cancels a call, attached or not. Returns `false` if the call has already ended or runs as a task.
    ///
    /// The call's token fires, and if it is a session call, its server is notified. If the client is still connected, it receives the
    /// JSON-RPC error -32800, or -32001 for [`TimedOut`](CancelReason::TimedOut). A call that runs as a task can only be ended by its
    /// client.
    pub fn cancel(&self, id: CallId, reason: CancelReason) -> bool {
        let exchange = self.registry.call(id);
        exchange.is_some_and(|exchange| exchange.cancel(id, Cancel::now(reason)))
    }

    /// Cancels all of a session's calls except tasks, and returns how many were cancelled.
    ///
    /// Cancels no calls if two servers behind the layer have issued the same session id and both have calls in flight under it.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancelReason};
    ///
    /// let calls = CancelOnDisconnectLayer::new().calls();
    /// assert_eq!(calls.cancel_session("a session", CancelReason::Requested), 0);
    /// ```
    pub fn cancel_session(&self, session: &str, reason: CancelReason) -> usize {
        if self.registry.is_ambiguous(session) {
            return 0;
        }
        let calls = self.registry.calls_in(session);
        calls
            .filter(|(id, exchange)| exchange.cancel(*id, Cancel::now(reason)))
            .count()
    }

    /// Records that a client has resumed a call on another server, through a shared event store.
    ///
    /// After that, the call keeps running on this server without a client, even if the loss of its old connection is only detected later.
    /// The usual rules apply again once the client resumes on this server. Returns `false` if no in-flight call can have sent that event
    /// id. [Operating](crate::manual::operating#several-servers-and-event-stores) describes when to use this method.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let calls = CancelOnDisconnectLayer::new().calls();
    /// assert!(!calls.resumed_elsewhere("a session", "0/1"), "no such call");
    /// ```
    pub fn resumed_elsewhere(&self, session: &str, last_event_id: &str) -> bool {
        let event_id = last_event_id.as_bytes();
        let calls = self
            .registry
            .with_session(session, |state| state.candidates_for_event(event_id));
        let calls = calls.unwrap_or_default().into_iter();
        // Count all matches, because `any` would stop at the first call.
        calls
            .filter(|(id, exchange)| exchange.mark_maybe_resumed(*id))
            .count()
            > 0
    }

    /// Waits up to `limit` for all calls to end, then cancels the rest.
    ///
    /// The drain also waits for answers still on their way to their clients, but not for subscriptions to end. Calls are cancelled as
    /// [`ShuttingDown`](CancelReason::ShuttingDown), unless they run as tasks. The drain then closes all of the layer's open event streams,
    /// including standalone streams and subscriptions, as well as any stream opened after that. Calls started later are cancelled at once,
    /// unless they run as tasks.
    ///
    /// On its own, `axum::serve(…).with_graceful_shutdown(…)` never finishes while an event stream is open. Start the drain and the
    /// graceful shutdown at the same time, so that no new calls arrive while the old ones are ending. A drain cannot end a connection on
    /// which only part of a request has arrived, so give axum's future its own timeout, as the `shutdown` example does.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Calls};
    ///
    /// async fn serve(app: axum::Router, calls: Calls) -> std::io::Result<()> {
    ///     let listener = tokio::net::TcpListener::bind("127.0.0.1:8000").await?;
    ///     let (start, started) = tokio::sync::oneshot::channel();
    ///     let shutdown = async {
    ///         tokio::signal::ctrl_c().await.ok();
    ///         start.send(()).ok();
    ///     };
    ///     let server = axum::serve(listener, app).with_graceful_shutdown(shutdown);
    ///     let drain = async {
    ///         started.await.ok();
    ///         calls.drain(Duration::from_secs(30)).await
    ///     };
    ///     let (served, report) = tokio::join!(server, drain);
    ///     println!("{} calls ended, {} were cancelled", report.ended, report.cancelled);
    ///     served
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # let _ = serve;
    /// # let report = CancelOnDisconnectLayer::new().calls().drain(Duration::ZERO).await;
    /// # assert_eq!((report.ended, report.cancelled), (0, 0));
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// A drain dropped before it completes has cancelled either all of the remaining calls or none of them. If it has cancelled them, the
    /// cancellations are still delivered. Several drains can run concurrently. Once the first drain has cancelled the remaining calls, the
    /// other drains complete too, unless a call that runs as a task remains. Each drain counts the calls that ended without a cancellation
    /// while it was waiting.
    pub async fn drain(&self, limit: Duration) -> DrainReport {
        let completed_before = self.registry.begin_drain();
        let all_ended = wait_until(self.registry.ended(), || {
            is_drained(&self.registry) && !self.registry.is_delivering()
        });
        match Instant::now().checked_add(limit) {
            Some(deadline) => {
                // The remaining calls are cancelled either way.
                let _ = timeout_at(deadline, all_ended).await;
            }
            None => all_ended.await,
        }
        let (calls, streams) = self.registry.close();
        let ended = self.registry.completions_since(completed_before);
        let (delivered, mut all_delivered) = mpsc::channel(1);
        let mut cancelled = 0;
        for (id, exchange) in calls {
            if exchange.call(id).is_some_and(CallInfo::is_task) {
                // A task keeps running, and its client may resume it elsewhere. Registering its streams closes them, because the registry
                // is already closed.
                exchange.register_orphaned_streams();
                continue;
            }
            if exchange.cancel_at_shutdown(id, &delivered) {
                cancelled += 1;
            }
        }
        for stream in streams {
            stream.close();
        }
        drop(delivered);
        let _ = timeout(DRAIN_ACCEPT_TIMEOUT, all_delivered.recv()).await;
        DrainReport { ended, cancelled }
    }
}

// === impl RawSnapshot ===

impl RawSnapshot {
    fn new(id: CallId, entry: &Entry<Arc<Exchange>>) -> Self {
        Self {
            id,
            exchange: entry.call.clone(),
            detached_at: entry.detached_at(),
            grace_deadline: entry.grace_deadline(),
            deadline: entry.deadline(),
        }
    }

    /// Returns the call's snapshot as of `now`.
    fn snapshot(self, now: Instant) -> Option<CallSnapshot> {
        let info = self.exchange.call(self.id)?.clone();
        let time_left = |at: Instant| at.saturating_duration_since(now);
        let state = match self.detached_at {
            None => CallState::Attached,
            Some(at) => CallState::Detached {
                since: now.saturating_duration_since(at),
                grace_left: self.grace_deadline.map(time_left),
            },
        };
        Some(CallSnapshot {
            age: now.saturating_duration_since(info.started_at()),
            info,
            state,
            time_left: self.deadline.map(time_left),
        })
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("len", &self.len()).finish()
    }
}

/// Returns `true` if there are no calls left to wait for. Subscriptions are ignored, because they never end on their own.
fn is_drained(registry: &Registry) -> bool {
    let mut remaining = registry.scan_calls(|id, entry| {
        let call = entry.call.call(id);
        call.filter(|call| call.method() != LISTEN).map(|_| ())
    });
    remaining.next().is_none()
}
