//! A server with the layer in place, in each way to use it, and what tests can observe.
//!
//! ```ignore
//! let setup = Server::Wrapped.start().await;
//! let mcp = setup.mcp().await;
//! let call = setup.start_call(&mcp, 1, "hold", "a").await;
//! call.fin();
//! assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Cancelled(CancelReason::ClientDisconnected));
//! ```
//!
//! | what | where |
//! |---|---|
//! | what the layer reports | [`Events`] |
//! | what it logs | [`Lines`] |
//! | when the layer has finished with an exchange, even if it reports nothing | [`Exchanges`] |
//! | the tokens that handlers hold | [`Tokens`] |
//! | a handler with a script from the test | [`Scripted`] |
//! | a middleware that holds requests or responses | [`Gate`] |
//! | a clock that moves only when the test moves it | [`StoppedClock`] |
//!
//! rmcp's keep-alives are always off, because a disconnect must be detected without a write.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::Router;
use mcp_cancel_on_disconnect::{
    AbortOnCancel, CallToken, Calls, CancelOnDisconnectLayer, CancelReason,
    CancellableSessionManager, Grace, Outcome,
};
use rmcp::{
    RoleServer, ServerHandler,
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionHandle, LocalSessionManager},
    },
};
use serde_json::{Value, json};
use socket2::SockRef;
use tokio::net::TcpListener;

use crate::support::*;

mod clock;
mod events;
mod exchanges;
mod gate;
mod ledger;
mod lines;
mod scripted;
mod slow_auth;
mod stalled;
mod store;

pub(crate) use self::{
    clock::{StoppedClock, advance_past, paused_runtime},
    events::{EventKind, Events},
    exchanges::{EXCHANGE, Exchanges, PolledBody},
    gate::{Gate, Held},
    ledger::Ledger,
    lines::{Lines, request_span},
    scripted::Scripted,
    slow_auth::slow_auth,
    stalled::stalled,
    store::{FIRST_STORED, Failing, SavedSessions, Store},
};

/// The grace period set by [`Plan::with_grace`].
pub(crate) const GRACE: Duration = Duration::from_secs(20);

/// The resolution to which tokio rounds timers up.
pub(crate) const TICK: Duration = Duration::from_millis(1);

pub(crate) const ORPHANED: Outcome = Outcome::Cancelled(CancelReason::Orphaned);
pub(crate) const DISCONNECTED: Outcome = Outcome::Cancelled(CancelReason::ClientDisconnected);

/// The id of the first event on a session's first stream.
pub(crate) const FIRST_EVENT: &str = "0/0";

/// The ways to use the layer, plus rmcp without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    /// Sessions with a [`CancellableSessionManager`].
    Wrapped,
    /// Sessions with rmcp's own manager.
    LayerOnly,
    /// No sessions, and every response is a stream.
    StatelessSse,
    /// No sessions, and a response is a stream only if another message precedes the answer.
    StatelessJson,
    /// Sessions without the layer.
    Bare,
}

/// A setup that has not been started yet.
pub(crate) struct Plan {
    server: Server,
    layer: CancelOnDisconnectLayer,
    local: LocalSessionManager,
    wrap: Box<dyn FnOnce(LocalSessionManager) -> Wrapper>,
    config: StreamableHttpServerConfig,
    inside: Box<dyn FnOnce(Router) -> Router>,
    outside: Box<dyn FnOnce(Router) -> Router>,
    send_buffer: Option<usize>,
    abort_after: Option<Duration>,
}

pub(crate) type Wrapper = CancellableSessionManager<LocalSessionManager>;

/// A server's sessions.
#[derive(Clone, Debug)]
pub(crate) enum Sessions {
    Wrapped(Arc<Wrapper>),
    Local(Arc<LocalSessionManager>),
}

/// A running server, and everything that can be observed about it.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) server: Server,
    pub(crate) sessions: Sessions,
    pub(crate) served: Served,
    pub(crate) calls: Calls,
    pub(crate) witness: Witness,
    pub(crate) events: Events,
    pub(crate) exchanges: Exchanges,
    pub(crate) tokens: Tokens,
}

/// The token that each labelled handler has been given.
#[derive(Clone, Default)]
pub(crate) struct Tokens(Arc<Mutex<HashMap<String, CallToken>>>);

/// Turns tests that take a [`Server`] into a `#[tokio::test]` for each of these servers.
///
/// The tests for a server are in a module named after it. The runtime flavor may be given between the servers and the
/// tests. `sessions` stands for the servers with sessions, and `all` includes those without.
macro_rules! for_servers {
    (sessions $tests:tt) => {
        crate::setup::for_servers!([wrapped = Wrapped, layer_only = LayerOnly] () $tests);
    };
    (all $tests:tt $(sessions $of_sessions:tt)?) => {
        crate::setup::for_servers!([
            wrapped = Wrapped,
            layer_only = LayerOnly,
            stateless_sse = StatelessSse,
            stateless_json = StatelessJson,
        ] () $tests);
        $(crate::setup::for_servers!(
            [wrapped_session = Wrapped, layer_only_session = LayerOnly] () $of_sessions
        );)?
    };
    ([$($module:ident = $server:ident),+ $(,)?] {$($tests:tt)+}) => {
        crate::setup::for_servers!([$($module = $server),+] () {$($tests)+});
    };
    ([$($module:ident = $server:ident),+ $(,)?] $flavor:tt $tests:tt) => {
        $(crate::setup::for_servers!(@ $module $server $flavor $tests);)+
    };
    (@ $module:ident $server:ident $flavor:tt { $($test:ident,)+ }) => {
        mod $module {
            $(
                #[tokio::test $flavor]
                async fn $test() {
                    super::$test(crate::setup::Server::$server).await;
                }
            )+
        }
    };
}

pub(crate) use for_servers;

// === impl Server ===

impl Server {
    /// Serves [`Tools`], with any disconnect cancelling at once.
    pub(crate) async fn start(self) -> Setup {
        Plan::of(self).start().await
    }

    /// Serves [`Tools`] like [`start`](Self::start), and also returns a client.
    pub(crate) async fn client(self) -> (Setup, Mcp) {
        Plan::of(self).client().await
    }

    /// Like [`client`](Self::client), but with a stopped clock.
    pub(crate) async fn stopped(self) -> (StoppedClock, Setup, Mcp) {
        Plan::of(self).stopped().await
    }

    pub(crate) fn has_sessions(self) -> bool {
        self.mode() == Mode::Session
    }

    fn mode(self) -> Mode {
        match self {
            Self::Wrapped | Self::LayerOnly | Self::Bare => Mode::Session,
            Self::StatelessSse => Mode::StatelessSse,
            Self::StatelessJson => Mode::StatelessJson,
        }
    }

    fn config(self) -> StreamableHttpServerConfig {
        self.mode().config().with_sse_keep_alive(None)
    }
}

// === impl Plan ===

impl Plan {
    /// Returns the default plan, in which a disconnect cancels at once.
    pub(crate) fn of(server: Server) -> Self {
        Self {
            server,
            layer: CancelOnDisconnectLayer::new().grace(Grace::Immediate),
            local: LocalSessionManager::default(),
            wrap: Box::new(CancellableSessionManager::new),
            config: server.config(),
            inside: Box::new(|router| router),
            outside: Box::new(|router| router),
            send_buffer: None,
            abort_after: None,
        }
    }

    /// Returns the default plan with a grace period of [`GRACE`].
    pub(crate) fn with_grace(server: Server) -> Self {
        Self::of(server).grace(Grace::After(GRACE))
    }

    /// Sets the grace period. By default there is none.
    pub(crate) fn grace(mut self, grace: Grace) -> Self {
        self.layer = self.layer.grace(grace);
        self
    }

    /// Changes the layer's options.
    pub(crate) fn layer(
        mut self,
        change: impl FnOnce(CancelOnDisconnectLayer) -> CancelOnDisconnectLayer,
    ) -> Self {
        self.layer = change(self.layer);
        self
    }

    /// Changes the session manager.
    pub(crate) fn sessions(
        mut self,
        change: impl FnOnce(LocalSessionManager) -> LocalSessionManager,
    ) -> Self {
        self.local = change(self.local);
        self
    }

    /// Changes how the session manager is wrapped.
    pub(crate) fn wrap(
        mut self,
        wrap: impl FnOnce(LocalSessionManager) -> Wrapper + 'static,
    ) -> Self {
        self.wrap = Box::new(wrap);
        self
    }

    /// Stores the events from all calls in a [`Store`].
    pub(crate) fn stored(self) -> Self {
        self.sessions(|local| local.with_event_store(Arc::new(Store::default())))
    }

    /// Saves the sessions to a store, from which they can be restored.
    pub(crate) fn saving(self, sessions: SavedSessions) -> Self {
        self.config(|mut config| {
            config.session_store = Some(Arc::new(sessions));
            config
        })
    }

    /// Wraps the handler in [`AbortOnCancel`].
    pub(crate) fn abort_after(mut self, window: Duration) -> Self {
        self.abort_after = Some(window);
        self
    }

    /// Changes rmcp's configuration.
    pub(crate) fn config(
        mut self,
        change: impl FnOnce(StreamableHttpServerConfig) -> StreamableHttpServerConfig,
    ) -> Self {
        self.config = change(self.config);
        self
    }

    /// Adds a middleware between the layer and the server.
    pub(crate) fn inside(mut self, wrap: impl FnOnce(Router) -> Router + 'static) -> Self {
        self.inside = Box::new(wrap);
        self
    }

    /// Adds a middleware around the layer.
    pub(crate) fn outside(mut self, wrap: impl FnOnce(Router) -> Router + 'static) -> Self {
        self.outside = Box::new(wrap);
        self
    }

    /// Limits how many unread bytes a socket can buffer.
    pub(crate) fn send_buffer(mut self, bytes: usize) -> Self {
        self.send_buffer = Some(bytes);
        self
    }

    /// Serves [`Tools`].
    pub(crate) async fn start(self) -> Setup {
        let witness = Witness::new();
        let tokens = Tokens::default();
        let recorder = tokens.clone();
        let tools =
            Tools::new(&witness).on_start(move |label, context| recorder.record(label, context));
        self.serve(tools, witness, tokens).await
    }

    /// Serves [`Tools`]. Also returns a client, with its own session if the server has sessions.
    pub(crate) async fn client(self) -> (Setup, Mcp) {
        let setup = self.start().await;
        let mcp = setup.mcp().await;
        (setup, mcp)
    }

    /// Serves [`Tools`] with a stopped clock, and also returns a client.
    pub(crate) async fn stopped(self) -> (StoppedClock, Setup, Mcp) {
        let clock = StoppedClock::stop();
        let (setup, mcp) = self.client().await;
        (clock, setup, mcp)
    }

    /// Serves a scripted handler.
    pub(crate) async fn start_scripted(self, handler: Scripted) -> Setup {
        let witness = handler.witness.clone();
        let tokens = handler.tokens.clone();
        self.serve(handler, witness, tokens).await
    }

    /// Serves any handler, without a witness.
    pub(crate) async fn start_handler<H: ServerHandler + Clone>(self, handler: H) -> Setup {
        self.serve(handler, Witness::new(), Tokens::default()).await
    }

    async fn serve<H: ServerHandler + Clone>(
        self,
        handler: H,
        witness: Witness,
        tokens: Tokens,
    ) -> Setup {
        let events = Events::default();
        let layer = self.layer.observe(events.observer());
        let calls = layer.calls();
        let sessions = Sessions::new(self.server, self.local, self.wrap);
        let router = match self.abort_after {
            Some(window) => {
                let handler = AbortOnCancel::new(handler).after(window);
                sessions.router(handler, self.config)
            }
            None => sessions.router(handler, self.config),
        };
        let router = (self.inside)(router);
        let router = match self.server {
            Server::Bare => router,
            _ => router.layer(layer),
        };
        let router = (self.outside)(router);
        let exchanges = Exchanges::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        if let Some(bytes) = self.send_buffer {
            let socket = SockRef::from(&listener);
            socket.set_send_buffer_size(bytes).expect("a send buffer");
        }
        Setup {
            server: self.server,
            sessions,
            served: serve_on(listener, exchanges.watch(router)),
            calls,
            witness,
            events,
            exchanges,
            tokens,
        }
    }
}

// === impl Sessions ===

impl Sessions {
    fn new(
        server: Server,
        local: LocalSessionManager,
        wrap: impl FnOnce(LocalSessionManager) -> Wrapper,
    ) -> Self {
        match server {
            Server::Wrapped => Self::Wrapped(Arc::new(wrap(local))),
            _ => Self::Local(Arc::new(local)),
        }
    }

    pub(crate) fn router<H>(&self, handler: H, config: StreamableHttpServerConfig) -> Router
    where
        H: ServerHandler + Clone,
    {
        let make = move || Ok(handler.clone());
        let router = Router::new();
        match self.clone() {
            Self::Wrapped(sessions) => {
                let service = StreamableHttpService::new(make, sessions, config);
                router.nest_service(PATH, service)
            }
            Self::Local(sessions) => {
                let service = StreamableHttpService::new(make, sessions, config);
                router.nest_service(PATH, service)
            }
        }
    }

    /// Returns rmcp's own manager, whether or not it is wrapped.
    pub(crate) fn local(&self) -> &LocalSessionManager {
        match self {
            Self::Wrapped(sessions) => sessions.inner(),
            Self::Local(sessions) => sessions,
        }
    }

    /// Ends a call's stream on the server side, as in SEP-1699. The client should reconnect.
    pub(crate) async fn end_stream(&self, mcp: &Mcp, stream: u64, retry: Option<Duration>) {
        let closed = self.handle(mcp).await.close_sse_stream(stream, retry).await;
        closed.expect("the stream is open");
    }

    /// Ends a session's standalone stream on the server side.
    pub(crate) async fn end_standalone_stream(&self, mcp: &Mcp, retry: Option<Duration>) {
        let handle = self.handle(mcp).await;
        let closed = handle.close_standalone_sse_stream(retry).await;
        closed.expect("the stream is open");
    }

    async fn handle(&self, mcp: &Mcp) -> LocalSessionHandle {
        let id = mcp.session_id().expect("a session");
        let handle = self.local().sessions.read().await.get(id).cloned();
        handle.expect("the session exists")
    }
}

// === impl Setup ===

impl Setup {
    /// Returns a client, with its own session if the server has sessions.
    pub(crate) async fn mcp(&self) -> Mcp {
        let mcp = Mcp::stateless(self.served.addr, PATH);
        if self.server.has_sessions() {
            mcp.connect().await
        } else {
            mcp
        }
    }

    /// Starts a call and waits until its handler has started. The label also names the exchange.
    pub(crate) async fn start_call(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
        tool: &str,
        label: &str,
    ) -> Connection {
        let mcp = mcp.clone().header(EXCHANGE, label);
        let call = mcp.call(id, tool, arguments(label)).await;
        self.witness.started(label).await;
        call
    }

    /// Starts a call and reads its priming event.
    pub(crate) async fn start_primed(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
        tool: &str,
        label: &str,
    ) -> Connection {
        let mut call = self.start_call(mcp, id, tool, label).await;
        call.head().await;
        assert!(call.event().await.expect("an event").is_priming());
        call
    }

    /// Starts a call, then disconnects its client after the priming event, whose id is returned.
    ///
    /// Waits until the call is detached.
    pub(crate) async fn cut(&self, mcp: &Mcp, id: impl Into<Value>, label: &str) -> String {
        let id = id.into();
        let mut call = self.start_call(mcp, id.clone(), "hold", label).await;
        call.head().await;
        let primed = call.event().await.expect("the priming event");
        assert!(primed.is_priming());
        call.fin();
        self.events.detached(mcp, id).await;
        primed.id.expect("an id")
    }

    /// Resumes a session's first stream, after `nth - 1` earlier resumes of its call `id`.
    pub(crate) async fn resume(&self, mcp: &Mcp, id: impl Into<Value>, nth: usize) -> Connection {
        let mut resumed = mcp.resume(FIRST_EVENT).await;
        assert_eq!(resumed.head().await.status, 200);
        self.events.resumed(mcp, id, nth).await;
        resumed
    }

    /// Starts a call on a stream of an HTTP/2 connection and waits for its handler to start.
    pub(crate) async fn start_on_h2(
        &self,
        connection: &mut H2,
        mcp: &Mcp,
        id: impl Into<Value>,
        tool: &str,
        label: &str,
    ) -> H2Stream {
        let mcp = mcp.clone().header(EXCHANGE, label);
        let request = mcp.call_request(id, tool, arguments(label));
        let stream = connection.send(&request).await;
        self.witness.started(label).await;
        stream
    }

    /// Makes a whole call under a unique id.
    ///
    /// When this returns, any messages that were already queued in the session, such as a cancellation, have been processed.
    pub(crate) async fn assert_usable(&self, mcp: &Mcp) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let text = format!("echo-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut call = mcp
            .call(text.clone(), "echo", json!({ "text": &text }))
            .await;
        let answer = call.answer().await.expect("an answer to the echo");
        assert_eq!(answer["id"], *text);
        assert_eq!(answer["result"]["content"][0]["text"], *text);
    }

    /// Waits until `count` calls are in flight.
    pub(crate) async fn calls_reach(&self, count: usize) {
        let reached = async {
            while self.calls.len() != count {
                tokio::task::yield_now().await;
            }
        };
        within(format!("{count} calls in flight"), reached).await;
    }

    /// Lets a held call complete and reads its answer.
    pub(crate) async fn assert_completes(&self, label: &str, call: &mut Connection) {
        self.witness.release(label);
        call.assert_done(label).await;
        assert!(self.witness.ended(label).await.is_completed());
        assert!(!self.tokens.of(label).is_cancelled());
    }
}

/// Returns the arguments for the labelled tools in [`Tools`]. `chatty` sends one event.
pub(crate) fn arguments(label: &str) -> Value {
    json!({ "label": label, "events": 1 })
}

// === impl Tokens ===

impl Tokens {
    /// Records the token that the handler with this label can reach.
    pub(crate) fn record(&self, label: &str, context: &RequestContext<RoleServer>) {
        if let Some(token) = CallToken::of(context) {
            let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            tokens.insert(label.to_owned(), token);
        }
    }

    /// Returns the token of the handler with this label, which must have started.
    pub(crate) fn of(&self, label: &str) -> CallToken {
        let tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let token = tokens.get(label).cloned();
        token.unwrap_or_else(|| panic!("the handler for {label:?} found no token"))
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}
