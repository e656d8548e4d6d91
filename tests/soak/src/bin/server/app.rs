//! The routes: rmcp in every set-up, with the layer around it.

use std::{sync::Arc, time::Duration};

use crate::{
    fault::{self, Fault},
    worker::Worker,
};
use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    middleware::from_fn,
    routing::post,
};
use mcp_cancel_on_disconnect::{
    AbortOnCancel, CallInfo, Calls, CancelOnDisconnectLayer, CancellableSessionManager, Grace,
    Policy,
};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionManager, SessionConfig},
    },
};
use soak::{
    clock::Micros,
    fact::Log,
    setup::{GRACE, IDLE, RETRY, SETUPS, Setup},
};

pub(crate) struct App {
    pub(crate) router: Router,
    pub(crate) calls: Calls,
    /// By route.
    pub(crate) sessions: Vec<(&'static str, Sessions)>,
}

/// The session manager of a route.
#[derive(Clone)]
pub(crate) enum Sessions {
    Wrapped(Arc<CancellableSessionManager<LocalSessionManager>>),
    Plain(Arc<LocalSessionManager>),
}

// === impl App ===

impl App {
    /// Those of all set-ups that are asked for; their layers share their calls.
    pub(crate) fn new(log: &Log, fault: Option<Fault>, is_here: impl Fn(&Setup) -> bool) -> Self {
        let layer = CancelOnDisconnectLayer::new();
        let mut app = Self {
            router: Router::new(),
            calls: layer.calls(),
            sessions: Vec::new(),
        };
        for setup in SETUPS.iter().filter(|setup| is_here(setup)) {
            let sessions = Sessions::new(setup.wrapped && fault != Some(Fault::Bare));
            let service = match sessions.clone() {
                Sessions::Wrapped(manager) => route(setup, manager, log),
                Sessions::Plain(manager) => route(setup, manager, log),
            };
            let mut service = match fault {
                Some(Fault::Bare) => service,
                _ => service.layer(options(layer.clone(), setup, fault)),
            };
            if fault == Some(Fault::Leak) {
                service = service.layer(from_fn(fault::leak));
            }
            let path = format!("/poll/{}/{{session}}/{{stream}}", setup.route);
            let poll = Router::new()
                .route(&path, post(poll))
                .with_state(sessions.clone());
            app.sessions.push((setup.route, sessions));
            app.router = app.router.merge(service).merge(poll);
        }
        app
    }
}

fn route<M: SessionManager>(setup: &Setup, sessions: Arc<M>, log: &Log) -> Router {
    let worker = Worker::new(log);
    match setup.abort {
        None => serve(setup, sessions, move || worker.clone()),
        Some(window) => serve(setup, sessions, move || {
            AbortOnCancel::new(worker.clone()).after(window)
        }),
    }
}

fn serve<M: SessionManager, H: ServerHandler>(
    setup: &Setup,
    sessions: Arc<M>,
    handler: impl Fn() -> H + Send + Sync + 'static,
) -> Router {
    let config = StreamableHttpServerConfig::default()
        .with_sse_retry(Some(RETRY))
        .with_legacy_session_mode(setup.sessions)
        .with_json_response(setup.json);
    let path = format!("/{}", setup.route);
    let service = StreamableHttpService::new(move || Ok(handler()), sessions, config);
    Router::new().nest_service(&path, service)
}

fn options(
    layer: CancelOnDisconnectLayer,
    setup: &Setup,
    fault: Option<Fault>,
) -> CancelOnDisconnectLayer {
    let timeout = setup.call_timeout;
    let mut layer = layer.policy(move |call: &CallInfo| {
        let policy = match (fault, call.session()) {
            (Some(Fault::Zombie), _) => Policy::new().grace(Grace::Never),
            (Some(Fault::FalseCancel), _) => Policy::new().grace(Grace::Immediate),
            (_, Some(_)) => Policy::new().grace(Grace::After(duration(GRACE))),
            // As the specification asks for.
            (_, None) => Policy::new(),
        };
        match timeout {
            Some(timeout) => policy.call_timeout(timeout),
            None => policy,
        }
    });
    if let Some(interval) = setup.keep_alive {
        layer = layer.keep_alive(interval).commit_after(interval);
    }
    if let Some(timeout) = setup.stall_timeout {
        layer = layer.stall_timeout(timeout);
    }
    layer
}

fn duration(micros: Micros) -> Duration {
    Duration::from_micros(micros)
}

/// What a tool does that polls: it ends the stream of a call, whose client is to come back (SEP-1699).
async fn poll(
    State(sessions): State<Sessions>,
    Path((session, stream)): Path<(String, u64)>,
) -> StatusCode {
    let handle = sessions
        .local()
        .sessions
        .read()
        .await
        .get(&*session)
        .cloned();
    let Some(handle) = handle else {
        return StatusCode::NOT_FOUND;
    };
    match handle.close_sse_stream(stream, Some(RETRY)).await {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(_) => StatusCode::CONFLICT,
    }
}

// === impl Sessions ===

impl Sessions {
    fn new(wrapped: bool) -> Self {
        let mut config = SessionConfig::default();
        config.sse_retry = Some(RETRY);
        config.keep_alive = Some(IDLE);
        if wrapped {
            return Self::Wrapped(Arc::new(CancellableSessionManager::local(config)));
        }
        let mut manager = LocalSessionManager::default();
        manager.session_config = config;
        Self::Plain(Arc::new(manager))
    }

    pub(crate) fn local(&self) -> &LocalSessionManager {
        match self {
            Self::Wrapped(manager) => manager.inner(),
            Self::Plain(manager) => manager,
        }
    }
}
