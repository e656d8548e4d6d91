//! One instance of the server under test.
//!
//! It writes its events to stdout as lines of JSON (`facts`). Each line on stdin is the tag of a call that may now answer.
//!
//! On SIGTERM it shuts down as documented: the public listener closes, and then `Cluster::leave` is called.

use std::{env, error::Error, io::stdin, process::ExitCode, sync::Arc, time::Duration};

use axum::{
    Router,
    serve::{Listener as _, ListenerExt as _},
};
use mcp_cancel_cluster::Cluster;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager, Event, Grace, observe::SessionEvent,
};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::local::SessionConfig,
};
use serde_json::json;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
    time::timeout,
};
use tracing_subscriber::{
    EnvFilter, Layer as _, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

use crate::{facts::record, fault::Fault, options::Options, tools::Tools};

mod facts;
mod fault;
mod options;
mod tools;

/// How long connections may take to close after the last call.
const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(2);

/// The reconnect delay sent to SDKs, which is short because the grace periods are.
const RETRY: Duration = Duration::from_millis(300);

/// The log filter if `RUST_LOG` is not set.
const LOG: &str = "warn,mcp_cancel_cluster=debug,mcp_cancel_on_disconnect=info";

type Failure = Box<dyn Error>;

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG));
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(facts::TurnedAway)
        .init();
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Result<(), Failure> {
    let options = Options::parse(env::args().skip(1))?;
    let (public, peers) = (
        TcpListener::bind(options.public).await?,
        TcpListener::bind(options.peers).await?,
    );
    // Events are small. With Nagle's algorithm they would wait for one another.
    let public = public.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let peers_address = options.peers.to_string();
    let advertised = options.advertise.as_ref().unwrap_or(&peers_address);
    let member = Cluster::redis(&options.redis).advertise(advertised);
    let mut member = member.client_backoff(options.backoff);
    if let Some(secret) = &options.secret {
        member = member.secret(secret);
    }
    let cluster = member.connect().await?;
    let tools = Tools::new(&options.name);
    let layer = layer(&cluster, &options);
    let app = app(&cluster, layer, tools.clone(), &options);

    // On a thread, because a blocked read from stdin would delay a runtime's shutdown.
    std::thread::spawn(move || read_releases(&tools));
    let mut terminated = signal(SignalKind::terminate())?;
    record(
        "ready",
        json!({ "public": public.local_addr()?.to_string() }),
    );
    let (start_shutdown, shutdown_started) = oneshot::channel::<()>();
    let served = axum::serve(public, app.clone()).with_graceful_shutdown(async {
        shutdown_started.await.ok();
    });
    let ending = async {
        terminated.recv().await;
        record("ending", json!({}));
        start_shutdown.send(()).ok();
        let cancelled = cluster.leave(options.drain).await;
        record("left", json!({ "cancelled": cancelled }));
    };
    let serving = async {
        let (served, ()) = tokio::join!(served.into_future(), cluster.serve_peers(peers, app));
        served
    };
    let (mut serving, mut ending) = (std::pin::pin!(serving), std::pin::pin!(ending));
    tokio::select! {
        ended = &mut serving => {
            ended?;
            // If the shutdown was the cause, let it complete.
            let _ = timeout(CONNECTION_END_TIMEOUT, ending).await;
        }
        // Connections that are still open end with the process.
        () = &mut ending => drop(timeout(CONNECTION_END_TIMEOUT, serving).await),
    }
    Ok(())
}

fn layer(cluster: &Cluster, options: &Options) -> CancelOnDisconnectLayer {
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::After(options.grace))
        .observe_fn(|event| {
            if let Event::Ended { call, outcome, .. } = event
                && call.tool().is_some()
            {
                let more = json!({
                    "session": call.session(),
                    "id": facts::short(call.request_id()),
                    "outcome": format!("{outcome:?}"),
                });
                record("outcome", more);
            }
        });
    match options.fault {
        Some(Fault::Unguarded) => layer,
        _ => cluster.protect(layer),
    }
}

fn app(
    cluster: &Cluster,
    layer: CancelOnDisconnectLayer,
    tools: Tools,
    options: &Options,
) -> Router {
    let mut session = SessionConfig::default();
    session.sse_retry = Some(RETRY);
    let sessions = CancellableSessionManager::local(session).on_session(|event| match event {
        SessionEvent::Opened {
            session, restored, ..
        } => record(
            "opened",
            json!({ "session": session, "restored": restored }),
        ),
        SessionEvent::Closed { session, .. } => record("closed", json!({ "session": session })),
        _ => {}
    });
    let sessions = Arc::new(cluster.sessions(sessions));
    let mut config = StreamableHttpServerConfig::default();
    config.sse_retry = Some(RETRY);
    config.session_store = Some(Arc::new(cluster.clone()));
    let mcp = StreamableHttpService::new(move || Ok(tools.clone()), sessions, config);
    let app = Router::new().nest_service("/mcp", mcp).layer(layer);
    match options.fault {
        Some(Fault::Alone) => app,
        Some(Fault::Lossy) => app
            .layer(axum::middleware::from_fn(fault::lose_answers))
            .layer(cluster.layer()),
        Some(Fault::Serial) => app
            .layer(cluster.layer())
            .layer(axum::middleware::from_fn(fault::read_in_turn)),
        Some(Fault::Unguarded) | None => app.layer(cluster.layer()),
    }
}

/// Releases the calls whose tags are read from stdin.
fn read_releases(tools: &Tools) {
    for tag in stdin().lines().map_while(Result::ok) {
        tools.release(&tag);
    }
}
