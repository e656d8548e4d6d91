//! Builds the proxy from its configuration and runs it.

use std::{
    collections::BTreeSet,
    fmt,
    future::{pending, ready},
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::{Either, join};
use mcp_cancel_on_disconnect::{
    Calls, CancelOnDisconnectLayer, Event, Grace, MIN_GRACE, Policy, RequestId,
    observe::{Metrics, ToolNames},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tower_layer::Layer as _;
use tracing::{info, warn};

use crate::{
    admin::{Admin, AdminState, Readiness},
    config::Config,
    cors::{self, StripCors},
    descriptors::Descriptors,
    drain::{MIN_PROCESS_TIMEOUT, POLL_INTERVAL, SHUTDOWN_TIMEOUT},
    event_store::EventStore,
    frontend::{Frontend, FrontendLimits, RequestFilter},
    http_service::{InnerService, OuterService},
    keep_running::{BackgroundCalls, Graces, KeepRunning},
    listing::Listing,
    log,
    public_url::PublicUrl,
    server::{Server, ServerError},
};

#[cfg(feature = "otel")]
use crate::traces::{self, Traced, TracedBodies};

/// How long the startup waits for a connection to the upstream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A proxy that is listening but not yet serving. Call [`serve`](Self::serve) to serve its clients.
#[derive(Debug)]
pub struct Proxy {
    config: Config,
    layer: CancelOnDisconnectLayer,
    server: Server,
    frontend: Frontend,
    admin: Option<Admin>,
    /// The tool names used as metric labels, or `None` if there are no metrics.
    tools: Option<ToolNames>,
    readiness: Readiness,
    ended: EndedCalls,
}

/// Counts ended calls. Clones share the count.
#[derive(Debug, Clone, Default)]
struct EndedCalls(Arc<AtomicUsize>);

/// The reason a proxy could not start, displayed as a message for the user.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The proxy can't listen on an address.
    Listen {
        /// The option that sets the address.
        option: &'static str,
        /// The address that the proxy can't listen on.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The server is invalid.
    Server(ServerError),
    /// Another I/O error.
    Io(io::Error),
}

// === impl Proxy ===

impl Proxy {
    /// Listens on the configured addresses and logs the startup messages.
    ///
    /// Also raises this process's descriptor limit and, if `--admin` is set, installs the metrics recorder.
    pub async fn bind(config: Config) -> Result<Self, StartError> {
        let server = Server::new(&config)?;
        let readiness = Readiness::default();
        let filter = RequestFilter::new(config.allow_host.clone(), config.allow_origin.clone());
        let sessions = config.upstream.is_none().then_some(config.max_sessions);
        let descriptors = Descriptors::raise(sessions);
        let limits = FrontendLimits {
            connections: descriptors.connections(),
            stall_timeout: config.stall_timeout.0,
            ..FrontendLimits::default()
        };
        let frontend = Frontend::bind(config.listen, filter, limits).await;
        let frontend =
            frontend.map_err(|error| StartError::listen("--listen", config.listen, error))?;
        let ended = EndedCalls::default();
        let mut layer = layer(&config, server.event_store())
            .observe_fn(ended.observer())
            .observe_fn(log::log_client_events(server.retention()));
        #[cfg(feature = "otel")]
        {
            layer = layer.observe_fn(traces::observe);
        }
        let mut tools = None;
        let admin = match config.admin {
            Some(address) => {
                let state = AdminState {
                    calls: layer.calls(),
                    readiness: readiness.clone(),
                    server: server.clone(),
                    options: config.operators.clone(),
                };
                let filter =
                    RequestFilter::new(config.allow_host.clone(), config.allow_origin.clone());
                let admin = Admin::bind(address, filter, state).await;
                let admin = admin.map_err(|error| StartError::listen("--admin", address, error))?;
                // `Metrics::new` registers its metrics with the recorder that `Admin::bind` has just installed.
                let names = ToolNames::new();
                layer = layer.observe(Metrics::new().tool_names(names.clone()));
                tools = Some(names);
                Some(admin)
            }
            None => None,
        };
        let proxy = Self {
            config,
            layer,
            server,
            frontend,
            admin,
            tools,
            readiness,
            ended,
        };
        proxy.log_startup().await?;
        if let Some(sessions) = descriptors.session_limit() {
            warn!(
                "the limit of {1} descriptors (ulimit -n) is enough for about {sessions} sessions, fewer than --max-sessions {0}",
                proxy.config.max_sessions,
                descriptors.limit()
            );
        }
        Ok(proxy)
    }

    /// Returns the address that the proxy listens on for clients.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.frontend.local_addr()
    }

    /// Returns the address that the proxy listens on for operators, if any.
    pub fn admin_addr(&self) -> io::Result<Option<SocketAddr>> {
        self.admin.as_ref().map(Admin::local_addr).transpose()
    }

    /// Returns the calls in flight.
    pub fn calls(&self) -> Calls {
        self.layer.calls()
    }

    /// Logs the address, the server, and what a disconnect does.
    async fn log_startup(&self) -> io::Result<()> {
        let address = self.local_addr()?;
        let connected = self.server.connect(CONNECT_TIMEOUT).await;
        info!(
            "listening on http://{address}{} (--listen) in front of {}{}; {}{}; {}",
            self.server.path(),
            self.server,
            describe_connection(&self.server, connected),
            describe_disconnect(self.config.grace, self.config.upstream.is_some()),
            describe_tool_exceptions(&self.config),
            if self.server.is_resumable() {
                "events are kept for clients that resume (--buffer)"
            } else {
                "events are not kept (--no-resumable)"
            }
        );
        for warning in self.config.warnings() {
            warn!("{warning}");
        }
        if let Some(admin) = self.admin_addr()? {
            if admin.ip().is_loopback() {
                info!("--admin: health, metrics and calls on http://{admin}/")
            } else if self.config.operators.admin_token.is_some() {
                info!(
                    "--admin: health and metrics on http://{admin}, and calls with the token from --admin-token"
                )
            } else {
                warn!(
                    "--admin: health and metrics on http://{admin}; calls are only shown on a loopback address"
                )
            }
        }
        Ok(())
    }

    /// Serves until `stop` completes, then shuts down in bounded time.
    ///
    /// The shutdown drains the calls, closes the connections and stops the session processes.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let calls = self.layer.calls();
        let named = named_tools(&self.config).map(str::to_owned);
        let service = KeepRunning::new(self.server.clone(), Graces::new(&self.config));
        let background_calls = service.background_calls();
        let service = Listing::new(service, named, self.tools.clone());
        #[cfg(feature = "otel")]
        let service = TracedBodies(service);
        let service = OuterService(self.layer.layer(InnerService(service)));
        #[cfg(feature = "otel")]
        let service = Traced(service);
        let filter = RequestFilter::new(self.config.allow_host.clone(), []);
        let service = PublicUrl::new(service, &self.config, filter);
        let (begin_close, closing) = oneshot::channel();
        let ending = async {
            stop.await;
            let (started, before) = (Instant::now(), self.ended.count());
            self.readiness.set_not_ready();
            let remaining_drain = || self.config.drain.saturating_sub(started.elapsed());
            // A call ends as soon as it is answered. Draining the calls alone is therefore not enough, because that could close a
            // stream while its client is still reading the answer.
            let answers_read = wait_until_answers_read(&self.server, &background_calls);
            let _ = timeout(remaining_drain(), answers_read).await;
            let cancelled = calls.drain(remaining_drain()).await.cancelled;
            // `EndedCalls` counts cancelled calls too.
            let ended = (self.ended.count() - before).saturating_sub(cancelled);
            info!(ended, cancelled, "calls drained (--drain)");
            // After this, the frontend closes its connections, but still lets clients read their answers in the remaining time.
            let _ = begin_close.send(remaining_drain());
            let process_timeout = SHUTDOWN_TIMEOUT
                .saturating_sub(started.elapsed())
                .max(MIN_PROCESS_TIMEOUT);
            self.server.shutdown(process_timeout).await;
        };
        let closing = async {
            // `begin_close` always sends before it is dropped.
            closing.await.unwrap_or_default()
        };
        let admin = async {
            if let Some(admin) = self.admin {
                admin.serve().await;
            }
            // Even if the operator pages end, keep serving clients.
            pending().await
        };
        let serving = match cors::layer(self.config.allow_origin) {
            Some(cors) => {
                let service = OuterService(cors.layer(StripCors(service)));
                Either::Left(self.frontend.serve(service, closing))
            }
            None => Either::Right(self.frontend.serve(service, closing)),
        };
        tokio::select! {
            ((), ()) = join(serving, ending) => {}
            () = admin => {}
        }
    }
}

/// Waits until clients have read their answers and no call is being read in the background.
async fn wait_until_answers_read(server: &Server, background_calls: &BackgroundCalls) {
    // Poll, because nothing signals that a client has read an answer.
    while server.is_in_progress() || !background_calls.is_empty() {
        sleep(POLL_INTERVAL).await;
    }
}

/// Builds the configured layer. `store` confirms an upstream's orphans.
fn layer(config: &Config, store: Option<EventStore>) -> CancelOnDisconnectLayer {
    let mut layer = CancelOnDisconnectLayer::new().grace(config.grace);
    let (graces, is_upstream) = (Graces::new(config), config.upstream.is_some());
    let exempt = graces.clone();
    layer = layer.policy(move |call| {
        match graces.for_tool(call.tool()) {
            // An upstream cancels a call without a session when the call's connection closes, so a grace period would have no
            // effect.
            Grace::After(_) if is_upstream && call.session().is_none() => {
                Policy::new().grace(Grace::Auto)
            }
            grace => Policy::new().grace(grace),
        }
    });
    if !config.exempt.is_empty() {
        layer = layer.exempt(move |call| exempt.is_exempt(call.tool()));
    }
    if let Some(timeout) = config.call_timeout {
        layer = layer.call_timeout(timeout);
    }
    if let Some(interval) = config.keep_alive.0 {
        layer = layer.keep_alive(interval);
    }
    if let Some(timeout) = config.stall_timeout.0 {
        layer = layer.stall_timeout(timeout);
    }
    // Do this for upstreams only. A command's calls get an event stream right away, and `stdio` refuses a call if the command
    // might confuse its id with another call's.
    if config.upstream.is_some() {
        layer = layer.commit_after(config.commit_after).exempt(|call| {
            call.session().is_some() && is_ambiguous_in_javascript(call.request_id())
        });
        if let Some(store) = store {
            layer = layer.confirm(move |orphan| ready(store.confirm(orphan)));
        }
    }
    layer
}

/// Returns `true` if JavaScript would read other ids as the same number.
fn is_ambiguous_in_javascript(id: &RequestId) -> bool {
    const FIRST_SHARED: u64 = 1 << 53;
    matches!(id, RequestId::Number(number) if number.unsigned_abs() >= FIRST_SHARED)
}

/// Describes whether the upstream accepts connections.
///
/// Returns an empty string for a command, which has not been started yet.
fn describe_connection(server: &Server, connected: io::Result<()>) -> String {
    match (server, connected) {
        (Server::Stdio(_), _) => String::new(),
        (_, Ok(())) => ", which accepts connections".to_owned(),
        (_, Err(error)) => format!(", which is not accepting connections yet ({error})"),
    }
}

/// Describes what a disconnect does.
fn describe_disconnect(grace: Grace, is_upstream: bool) -> String {
    let after = |grace| {
        format!(
            "a disconnect cancels its call at once, or after {grace:?} if its client can resume it (--grace)"
        )
    };
    match grace {
        Grace::Immediate => "a disconnect cancels its call at once (--grace)".to_owned(),
        Grace::Never => "a disconnect never cancels a call (--grace)".to_owned(),
        // A call without a session is cancelled as soon as its connection closes.
        Grace::After(grace) if is_upstream => format!(
            "a disconnect cancels its call after {grace:?} unless its client resumes it, or at once without a session (--grace)"
        ),
        Grace::After(grace) => {
            format!(
                "a disconnect cancels its call after {grace:?} unless its client resumes it (--grace)"
            )
        }
        Grace::AutoAfter(grace) => after(grace),
        _ => after(MIN_GRACE),
    }
}

/// Lists the tools to which [`describe_disconnect`] does not apply, if any.
fn describe_tool_exceptions(config: &Config) -> String {
    let tools: BTreeSet<&str> = named_tools(config).collect();
    if tools.is_empty() {
        String::new()
    } else {
        let tools: Vec<&str> = tools.into_iter().collect();
        format!(", except for {} (--exempt, --tool-grace)", tools.join(", "))
    }
}

/// Returns the tools named in options.
fn named_tools(config: &Config) -> impl Iterator<Item = &str> {
    let exempt = config.exempt.iter().map(String::as_str);
    exempt.chain(config.tool_grace.iter().map(|(tool, _)| tool.as_str()))
}

// === impl EndedCalls ===

impl EndedCalls {
    /// Returns an observer that counts calls as they end.
    fn observer(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static + use<> {
        let count = self.0.clone();
        move |event| {
            if let Event::Ended { .. } = event {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

// === impl StartError ===

impl StartError {
    fn listen(option: &'static str, address: SocketAddr, error: io::Error) -> Self {
        Self::Listen {
            option,
            address,
            error,
        }
    }
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ServerError> for StartError {
    fn from(error: ServerError) -> Self {
        Self::Server(error)
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen {
                option,
                address,
                error,
            } if error.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "another program is already listening on {address}: choose a free port with {option}"
                )
            }
            Self::Listen { address, error, .. } => write!(f, "cannot listen on {address}: {error}"),
            Self::Server(error) => error.fmt(f),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {}
