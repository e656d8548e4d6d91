//! The places in an app where the layer can go.

use std::{convert::Infallible, net::SocketAddr};

use axum::{Router, body::Body, routing::any_service};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use rmcp::transport::streamable_http_server::{StreamableHttpService, session::SessionManager};
use tokio::{net::TcpListener, task::JoinSet};
use tower::{Layer as _, Service, ServiceBuilder};
use tower_http::trace::TraceLayer;

use super::check_bench;
use crate::{
    stack::{Bench, SessionMode, bare, listening, wrapped},
    support::*,
};

macro_rules! wirings {
    ($($name:ident: |$rmcp:ident, $cancel:ident| $app:expr;)+) => {
        mod a_disconnected_call_is_cancelled_and_others_pass {
            use super::*;

            $(
                #[tokio::test]
                async fn $name() {
                    fn wire<M: SessionManager>(
                        $rmcp: StreamableHttpService<Tools, M>,
                        $cancel: CancelOnDisconnectLayer,
                    ) -> Router {
                        $app
                    }
                    for mode in SessionMode::ALL {
                        check_bench(&Bench::wired(mode, wire, wire).await).await;
                    }
                }
            )+
        }
    };
}

wirings! {
    around_a_router: |rmcp, cancel| Router::new().nest_service(PATH, rmcp).layer(cancel);
    around_its_routes: |rmcp, cancel| Router::new().nest_service(PATH, rmcp).route_layer(cancel);
    around_a_nested_service: |rmcp, cancel| Router::new().nest_service(PATH, cancel.layer(rmcp));
    around_a_route_service: |rmcp, cancel| Router::new().route_service(PATH, cancel.layer(rmcp));
    around_a_method_router: |rmcp, cancel| Router::new().route(PATH, any_service(rmcp).layer(cancel));
    around_a_fallback: |rmcp, cancel| Router::new().fallback_service(rmcp).layer(cancel);
    around_an_outer_router: |rmcp, cancel| Router::new()
        .nest(PATH, Router::new().route_service("/", rmcp))
        .layer(cancel);
    in_a_service_builder: |rmcp, cancel| Router::new().nest_service(
        PATH,
        ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(cancel)
            .map_request(|request: Request<_>| request.map(Body::new))
            .layer(TraceLayer::new_for_http())
            .service(rmcp),
    );
    twice: |rmcp, cancel| Router::new()
        .nest_service(PATH, cancel.layer(rmcp))
        .layer(cancel);
}

// --- Without axum ---

/// A service on plain hyper, which closes all connections when it is dropped.
struct Hyper {
    addr: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Hyper {
    async fn serve<S, B>(service: S) -> Self
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
        B: http_body::Body<Error: std::error::Error + Send + Sync, Data: Send> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound listener");
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                let service = TowerToHyperService::new(service.clone());
                connections.spawn(async move {
                    let builder = auto::Builder::new(TokioExecutor::new());
                    // A disconnect is an error at this level, as expected.
                    let _over = builder
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            addr,
            _tasks: tasks,
        }
    }
}

#[tokio::test]
async fn a_disconnect_cancels_a_call_on_plain_hyper() {
    for mode in SessionMode::ALL {
        let start = async |witness: &Witness, cancel: CancelOnDisconnectLayer| {
            let tools = listening(witness);
            let hyper = match mode {
                SessionMode::Wrapped => {
                    Hyper::serve(cancel.layer(tools.service(mode.mode(), wrapped()))).await
                }
                SessionMode::LayerOnly | SessionMode::Stateless => {
                    Hyper::serve(cancel.layer(tools.service(mode.mode(), bare()))).await
                }
            };
            (hyper.addr, hyper)
        };
        check_bench(&Bench::start(mode, start).await).await;
    }
}

#[tokio::test]
async fn a_disconnect_cancels_a_call_on_plain_hyper_with_a_service_builder() {
    let start = async |witness: &Witness, cancel: CancelOnDisconnectLayer| {
        let rmcp = listening(witness).service(Mode::Session, bare());
        let service = ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(cancel)
            .layer(TraceLayer::new_for_http())
            .service(rmcp);
        let hyper = Hyper::serve(service).await;
        (hyper.addr, hyper)
    };
    check_bench(&Bench::start(SessionMode::LayerOnly, start).await).await;
}
