//! The routes: rmcp in every set-up, with the layer around it.

use std::{sync::Arc, time::Duration};

use crate::{
    events::Events,
    fault::{self, Fault},
    worker::Worker,
};
use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    middleware::from_fn,
    routing::{post, post_service},
};
use mcp_cancel_on_disconnect::{
    AbortOnCancel, CallInfo, Calls, CancelOnDisconnectLayer, CancellableSessionManager, Grace,
    Policy,
};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::LocalSessionManager,
    },
};
use soak::{
    clock::Micros,
    fact::Log,
    setup::{GRACE, IDLE, RETRY, SETUPS, Setup},
};

/// The application, and what the gauges read from it.
pub(crate) struct App {
    pub(crate) router: Router,
    pub(crate) calls: Calls,
    /// By route.
    pub(crate) sessions: Vec<(&'static str, Sessions)>,
}

/// A route's session manager.
#[derive(Clone)]
pub(crate) enum Sessions {
    Wrapped(Arc<CancellableSessionManager<LocalSessionManager>>),
    Plain(Arc<LocalSessionManager>),
}

// === impl App ===

impl App {
    /// Serves the selected set-ups, whose layers share the calls.
    pub(crate) fn new(log: &Log, fault: Option<Fault>, is_served: impl Fn(&Setup) -> bool) -> Self {
        let layer = CancelOnDisconnectLayer::new();
        let mut app = Self {
            router: Router::new(),
            calls: layer.calls(),
            sessions: Vec::new(),
        };
        for setup in SETUPS.iter().filter(|setup| is_served(setup)) {
            let sessions = Sessions::new(setup, fault);
            let options = options(layer.clone(), setup, fault);
            let options = Some(options).filter(|_| fault != Some(Fault::Bare));
            let mut service = match sessions.clone() {
                Sessions::Wrapped(manager) => route(setup, manager, options, log),
                Sessions::Plain(manager) => route(setup, manager, options, log),
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

fn route<M: SessionManager>(
    setup: &Setup,
    sessions: Arc<M>,
    layer: Option<CancelOnDisconnectLayer>,
    log: &Log,
) -> Router {
    let worker = Worker::new(log);
    match setup.abort {
        None => serve(setup, sessions, layer, move || worker.clone()),
        Some(window) => serve(setup, sessions, layer, move || {
            AbortOnCancel::new(worker.clone()).after(window)
        }),
    }
}

fn serve<M: SessionManager, H: ServerHandler>(
    setup: &Setup,
    sessions: Arc<M>,
    layer: Option<CancelOnDisconnectLayer>,
    handler: impl Fn() -> H + Send + Sync + 'static,
) -> Router {
    let config = StreamableHttpServerConfig::default()
        .with_sse_retry(Some(RETRY))
        .with_legacy_session_mode(setup.has_sessions)
        .with_json_response(setup.answers_json);
    let service = StreamableHttpService::new(move || Ok(handler()), sessions, config);
    setup.paths().fold(Router::new(), |router, path| {
        let service = service.clone();
        match layer.clone() {
            None => router.nest_service(&path, service),
            Some(layer) if setup.layers_each_method => {
                let methods = post_service(service.clone()).get_service(service.clone());
                router.route(&path, methods.delete_service(service).layer(layer))
            }
            Some(layer) => router.merge(Router::new().nest_service(&path, service).layer(layer)),
        }
    })
}

/// Returns the layer with a set-up's options, or with a fault's.
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
            // The specification's default.
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

/// Ends a call's stream, as a polling tool does, so that the client resumes (SEP-1699).
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
    fn new(setup: &Setup, fault: Option<Fault>) -> Self {
        let is_wrapped = setup.is_wrapped && fault != Some(Fault::Bare);
        let mut manager = LocalSessionManager::default();
        manager.session_config.sse_retry = Some(RETRY);
        // The wrapper has its own timer, which does not close sessions with calls.
        manager.session_config.keep_alive = Some(IDLE).filter(|_| !is_wrapped);
        if let Some(kind) = setup.store {
            manager = manager.with_event_store(Arc::new(Events::new(kind)));
        }
        if is_wrapped {
            Self::Wrapped(Arc::new(
                CancellableSessionManager::new(manager).idle_timeout(IDLE),
            ))
        } else {
            Self::Plain(Arc::new(manager))
        }
    }

    /// Returns rmcp's own session manager.
    pub(crate) fn local(&self) -> &LocalSessionManager {
        match self {
            Self::Wrapped(manager) => manager.inner(),
            Self::Plain(manager) => manager,
        }
    }
}
