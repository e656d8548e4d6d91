//! The operator pages, on their own address: health, metrics and calls in flight.
//!
//! | path | what it does |
//! |---|---|
//! | `/healthz` | returns 200 while the program is running |
//! | `/readyz` | returns 503 during the shutdown and, with `--ready-upstream`, while the upstream accepts no connections; otherwise 200 |
//! | `/metrics` | returns the layer's and the proxy's metrics, for Prometheus |
//! | `/` | links to these pages |
//! | `/calls`, `/calls.json` | lists the calls in flight; the page has a button to cancel a call |
//! | `/calls/{id}/cancel` | lets a script cancel a call, with the token from `--admin-token` |
//! | `/sessions`, `/sessions.json` | lists a command's sessions, with their age and last use |
//!
//! `Host` must be one of this host's names, a host in `--allow-host`, or an IP address. The number of connections is limited.
//! On a loopback address, the calls and sessions are shown without a token. On any other address they require the token,
//! because without it, only this machine may cancel calls. Health and metrics never require the token.

use std::{
    future::pending,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    middleware::from_fn,
    response::Html,
    routing::get,
};
use mcp_cancel_on_disconnect::{Calls, observe::Metrics};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::{
    config::Operators,
    frontend::{Frontend, FrontendLimits, RequestFilter},
    lock::lock,
    log,
    server::Server,
};

// `calls_page` is a symbolic link to a module in the library's example, so that there is only one copy of it.
mod calls_page;
mod scripts;
mod session_metrics;
mod sessions_page;

use self::calls_page::Page;

/// How often metrics are moved out of their buffers. Each scrape also does this.
const METRICS_UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of operator connections.
const MAX_CONNECTIONS: usize = 64;

/// Maximum size of an operator's request body.
///
/// The button that cancels a call sends fewer than 100 bytes.
const MAX_BODY: usize = 64 * 1024;

/// Maximum lifetime of an operator connection.
///
/// This keeps a client that is not reading from holding on to its connection.
const CONNECTION_LIFETIME: Duration = Duration::from_secs(60);

/// How long `/readyz` waits for a connection to the upstream.
///
/// This is shorter than the 1 s after which Kubernetes' probes give up by default.
const READY_TIMEOUT: Duration = Duration::from_millis(500);

/// Whether the program accepts calls, for load balancers. Clones share the state.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<AtomicBool>);

/// What the pages show and act on.
#[derive(Debug, Clone)]
pub struct AdminState {
    /// The calls in flight.
    pub calls: Calls,
    /// Whether the program accepts calls.
    pub readiness: Readiness,
    /// The server, for its metrics.
    pub server: Server,
    /// The options for these pages.
    pub options: Operators,
}

/// The listener for operators, and the pages it serves.
#[derive(Debug)]
pub struct Admin {
    frontend: Frontend,
    router: Router,
    prometheus: PrometheusHandle,
}

// === impl Readiness ===

impl Readiness {
    /// Marks the program as not ready. It never becomes ready again.
    pub fn set_not_ready(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }
}

// === impl Admin ===

impl Admin {
    /// Listens on an address, and installs this process's metrics recorder.
    ///
    /// All instances in a process share one recorder.
    ///
    /// # Errors
    ///
    /// Returns an error if the proxy can't listen on the address, or if another recorder has already been installed.
    pub async fn bind(
        address: SocketAddr,
        filter: RequestFilter,
        state: AdminState,
    ) -> io::Result<Self> {
        let limits = FrontendLimits {
            connections: MAX_CONNECTIONS,
            body: MAX_BODY,
            bodies: MAX_CONNECTIONS * MAX_BODY,
            lifetime: Some(CONNECTION_LIFETIME),
            ..FrontendLimits::default()
        };
        let frontend = Frontend::bind(address, filter.allow_ip_addresses(), limits).await?;
        let prometheus = recorder().map_err(io::Error::other)?;
        let is_local = frontend.local_addr()?.ip().is_loopback();
        let router = router(state, prometheus.clone(), is_local);
        Ok(Self {
            frontend,
            router,
            prometheus,
        })
    }

    /// Returns the listener's address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.frontend.local_addr()
    }

    /// Serves the pages until the future is dropped.
    pub async fn serve(self) {
        let upkeep = async {
            let mut ticks = tokio::time::interval(METRICS_UPKEEP_INTERVAL);
            loop {
                ticks.tick().await;
                self.prometheus.run_upkeep();
            }
        };
        tokio::select! {
            // This never completes, because `pending()` never starts its shutdown.
            () = self.frontend.serve(self.router, pending()) => {}
            () = upkeep => {}
        }
    }
}

fn router(state: AdminState, prometheus: PrometheusHandle, is_local: bool) -> Router {
    let content_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    let server = state.server.clone();
    let sessions = sessions_page::routes(&server);
    let has_sessions = matches!(server, Server::Stdio(_));
    let metrics = async move || {
        (
            content_type,
            prometheus.render() + &own_metrics(&server) + &session_metrics::render(&server),
        )
    };
    let router = Router::new()
        .route("/", get(async move || Html(index(is_local, has_sessions))))
        .route("/healthz", get(async || "ok\n"))
        .route("/metrics", get(metrics))
        .route("/readyz", get(readyz).with_state(state.clone()));
    let page = Page::from(state.calls);
    let pages = calls_page::routes(page.clone()).merge(sessions);
    match (is_local, state.options.admin_token) {
        (true, None) => router.merge(pages.layer(from_fn(calls_page::local_names_only))),
        (true, Some(token)) => router
            .merge(pages.layer(from_fn(calls_page::local_names_only)))
            .merge(scripts::routes(page, token)),
        (false, Some(token)) => router
            .merge(scripts::restrict_to_token(pages, token.clone()))
            .merge(scripts::routes(page, token)),
        (false, None) => router,
    }
}

/// Returns the page at `/`. It links only to pages that a browser can open on this address.
fn index(is_local: bool, has_sessions: bool) -> String {
    let calls = if is_local {
        r#"<li><a href="/calls">Calls in flight</a> (<a href="/calls.json">JSON</a>)"#
    } else {
        "<li>Calls are only shown on a loopback address, or to scripts with --admin-token"
    };
    let sessions = if is_local && has_sessions {
        r#"<li><a href="/sessions">Sessions</a> (<a href="/sessions.json">JSON</a>)"#
    } else {
        ""
    };
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>mcp-cancel-proxy</title>\
         <h1>mcp-cancel-proxy {}</h1><ul>{calls}{sessions}\
         <li><a href=\"/metrics\">Metrics</a> for Prometheus\
         <li><a href=\"/healthz\">Health</a> and <a href=\"/readyz\">readiness</a></ul>\n",
        env!("CARGO_PKG_VERSION")
    )
}

async fn readyz(State(state): State<AdminState>) -> (StatusCode, &'static str) {
    if !state.readiness.is_ready() {
        return (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n");
    }
    if state.options.ready_upstream && state.server.connect(READY_TIMEOUT).await.is_err() {
        let text = "the MCP server is not accepting connections (--upstream)\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    (StatusCode::OK, "ready\n")
}

/// Returns the proxy's own metrics in Prometheus' text format.
fn own_metrics(server: &Server) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let name = "mcp_proxy_build_info";
    let line = format!("{name}{{version=\"{version}\"}} 1\n");
    let mut text = metric(name, "gauge", "Version of the program, always 1", &line);
    let mut add = |name, kind, help, value: u64| {
        let name = format!("mcp_proxy_{name}");
        text += &metric(&name, kind, help, &format!("{name} {value}\n"));
    };
    add(
        "log_lines_dropped_total",
        "counter",
        "Log lines that could not be written to standard error",
        log::dropped(),
    );
    if let Some(stats) = server.stats() {
        let counts = [
            ("sessions", "The server's sessions", stats.sessions),
            (
                "children",
                "Session processes, including those that are stopping",
                stats.children,
            ),
            (
                "buffer_bytes",
                "Bytes kept for clients that resume",
                stats.buffer_bytes,
            ),
        ];
        for (name, help, value) in counts {
            add(name, "gauge", help, value as u64);
        }
        let totals = [
            (
                "resumes_total",
                "Number of times a client resumed a stream",
                stats.resumes,
            ),
            (
                "gaps_total",
                "Number of times a client was notified of missing events",
                stats.gaps,
            ),
            (
                "kills_total",
                "Number of processes that had to be killed",
                stats.kills,
            ),
        ];
        for (name, help, value) in totals {
            add(name, "counter", help, value);
        }
    }
    text
}

/// Returns a metric in Prometheus' text format. `lines` has one line per set of labels.
fn metric(name: &str, kind: &str, help: &str, lines: &str) -> String {
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}")
}

/// Returns this process's metrics recorder. The first call installs it.
fn recorder() -> Result<PrometheusHandle, BuildError> {
    static RECORDER: Mutex<Option<PrometheusHandle>> = Mutex::new(None);
    let mut installed = lock(&RECORDER);
    if let Some(handle) = &*installed {
        return Ok(handle.clone());
    }
    let seconds = Matcher::Suffix("_seconds".to_owned());
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(seconds, &Metrics::BUCKETS)?
        .install_recorder()?;
    *installed = Some(handle.clone());
    Ok(handle)
}
