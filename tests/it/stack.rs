//! What the contract, middleware and bad-body tests share: the ways in which the layer meets rmcp, and a
//! log of the layer's events.

#![allow(
    unreachable_pub,
    reason = "nothing of a test binary is reachable; `pub` means: for the tests"
)]
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a broken expectation of a test ends the test; clippy only spares functions marked #[test]"
)]

use std::{
    any::Any,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::Router;
use http::StatusCode;
use mcp_cancel_on_disconnect::{
    CallInfo, CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Event, Grace,
    Outcome, RequestId, Unknown,
};
use rmcp::transport::streamable_http_server::{
    StreamableHttpService,
    session::local::{LocalSessionManager, SessionConfig},
};

use crate::support::*;

/// rmcp with a session manager that binds calls.
pub type Wrapped = StreamableHttpService<Tools, CancellableSessionManager<LocalSessionManager>>;

/// rmcp as it comes.
pub type Bare = StreamableHttpService<Tools, LocalSessionManager>;

/// How the layer meets rmcp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Sessions whose manager binds the calls.
    Wrapped,
    /// Sessions of an untouched manager: calls are read from the body and cancelled by a replay.
    LayerOnly,
    /// No sessions, answers as event streams.
    Stateless,
}

/// The layer's events in order. Clones share them.
#[derive(Clone, Debug)]
pub struct Log(Arc<Mutex<Vec<Happened>>>);

/// An event, as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happened {
    Started(Call),
    Detached(Call),
    Ended(Call, Outcome),
    CancelFailed(Call, Option<StatusCode>),
    Unknown(Unknown),
    Other(String),
}

/// What an event says about its call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub id: RequestId,
    pub method: String,
    pub tool: Option<String>,
    pub has_session: bool,
}

/// A running server with an immediate layer, and all that can be seen of it.
pub struct Bench {
    pub way: Way,
    pub witness: Witness,
    pub log: Log,
    pub layer: CancelOnDisconnectLayer,
    pub addr: SocketAddr,
    _server: Box<dyn Any>,
}

// === impl Way ===

impl Way {
    pub const ALL: [Self; 3] = [Self::Wrapped, Self::LayerOnly, Self::Stateless];

    pub fn mode(self) -> Mode {
        match self {
            Self::Wrapped | Self::LayerOnly => Mode::Session,
            Self::Stateless => Mode::StatelessSse,
        }
    }

    /// The rmcp server of this way at [`PATH`], without any layer.
    pub fn router(self, witness: &Witness) -> Router {
        let tools = Tools::new(witness);
        match self {
            Self::Wrapped => router(tools.service(self.mode(), wrapped())),
            Self::LayerOnly | Self::Stateless => router(tools.service(self.mode(), bare())),
        }
    }

    /// A client of that server, with a session if it has any.
    pub async fn client(self, addr: SocketAddr, headers: &[(&str, &str)]) -> Mcp {
        let client = Mcp::stateless(addr, PATH);
        let client = headers
            .iter()
            .fold(client, |client, (name, value)| client.header(name, value));
        match self {
            Self::Wrapped | Self::LayerOnly => client.connect().await,
            Self::Stateless => client,
        }
    }
}

/// A session manager that binds calls.
pub fn wrapped() -> Arc<CancellableSessionManager<LocalSessionManager>> {
    Arc::new(CancellableSessionManager::local(SessionConfig::default()))
}

/// rmcp's own.
pub fn bare() -> Arc<LocalSessionManager> {
    Arc::new(LocalSessionManager::default())
}

// === impl Bench ===

impl Bench {
    /// Serves what `build` makes of the bare router and the layer.
    pub async fn new(
        way: Way,
        build: impl FnOnce(Router, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let start = async |witness: &Witness, layer| {
            let served = serve(build(way.router(witness), layer)).await;
            (served.addr, served)
        };
        Self::start(way, start).await
    }

    /// Serves what is made of rmcp's service and the layer. Both functions do the same.
    pub async fn wired(
        way: Way,
        wire_wrapped: fn(Wrapped, CancelOnDisconnectLayer) -> Router,
        wire_bare: fn(Bare, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let start = async |witness: &Witness, layer| {
            let tools = Tools::new(witness);
            let router = match way {
                Way::Wrapped => wire_wrapped(tools.service(way.mode(), wrapped()), layer),
                Way::LayerOnly | Way::Stateless => {
                    wire_bare(tools.service(way.mode(), bare()), layer)
                }
            };
            let served = serve(router).await;
            (served.addr, served)
        };
        Self::start(way, start).await
    }

    /// Has `start` run the server, and keeps it as long as itself.
    pub async fn start<S: 'static>(
        way: Way,
        start: impl AsyncFnOnce(&Witness, CancelOnDisconnectLayer) -> (SocketAddr, S),
    ) -> Self {
        let witness = Witness::new();
        let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
        let (addr, server) = start(&witness, layer.clone()).await;
        Self {
            way,
            witness,
            log,
            layer,
            addr,
            _server: Box::new(server),
        }
    }

    /// A client, with a session if the server has any.
    pub async fn client(&self, headers: &[(&str, &str)]) -> Mcp {
        self.way.client(self.addr, headers).await
    }
}

// === impl Log ===

impl Log {
    /// An empty log.
    pub fn new() -> Self {
        Self(Arc::default())
    }

    /// A log of all that `layer` sees from now on.
    pub fn of(layer: CancelOnDisconnectLayer) -> (CancelOnDisconnectLayer, Self) {
        let log = Self::new();
        let writer = log.clone();
        let layer = layer.observe(move |event: &Event<'_>| writer.write(event));
        (layer, log)
    }

    /// All events so far.
    pub fn events(&self) -> Vec<Happened> {
        self.lock().clone()
    }

    /// How many calls have started so far.
    pub fn started(&self) -> usize {
        let events = self.lock();
        let started = |event: &&Happened| matches!(event, Happened::Started(_));
        events.iter().filter(started).count()
    }

    /// How the calls with this id ended so far, in order.
    pub fn ends(&self, id: &RequestId) -> Vec<Outcome> {
        let ended = |event: &Happened| match event {
            Happened::Ended(call, outcome) if call.id == *id => Some(*outcome),
            _ => None,
        };
        self.lock().iter().filter_map(ended).collect()
    }

    /// The calls that were cancelled so far, and why.
    pub fn cancelled(&self) -> Vec<(RequestId, CancelReason)> {
        let cancelled = |event: &Happened| match event {
            Happened::Ended(call, Outcome::Cancelled(reason)) => Some((call.id.clone(), *reason)),
            _ => None,
        };
        self.lock().iter().filter_map(cancelled).collect()
    }

    fn write(&self, event: &Event<'_>) {
        let happened = match event {
            Event::Started { call, .. } => Happened::Started(Call::of(call)),
            Event::Detached { call, .. } => Happened::Detached(Call::of(call)),
            Event::Ended { call, outcome, .. } => Happened::Ended(Call::of(call), *outcome),
            Event::CancelFailed { call, error, .. } => {
                Happened::CancelFailed(Call::of(call), error.status())
            }
            Event::Unknown { why, .. } => Happened::Unknown(*why),
            other => Happened::Other(format!("{other:?}")),
        };
        self.lock().push(happened);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Happened>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Call ===

impl Call {
    pub fn of(call: &CallInfo) -> Self {
        Self {
            id: call.request_id().clone(),
            method: call.method().to_owned(),
            tool: call.tool().map(str::to_owned),
            has_session: call.session().is_some(),
        }
    }
}

/// The id of a call that has a number.
pub fn number(id: i64) -> RequestId {
    RequestId::Number(id)
}
