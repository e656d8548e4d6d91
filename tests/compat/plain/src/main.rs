//! Routes without MCP, on axum and on plain hyper. Their work runs in a separate task and outlives the handler.

use std::{convert::Infallible, future::pending, net::SocketAddr};

use axum::{Extension, Router, routing::get};
use compat::{Mode, PATH, Setup, Tier, Witness};
use http_body_util::Empty;
use hyper::{
    Request, Response,
    body::{Body, Bytes, Incoming},
    server::conn::http1,
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use mcp_cancel_on_disconnect::CallToken;
use tokio::net::TcpListener;
use tower::{Layer as _, Service, service_fn};

/// The story that every client of this server plays.
const LABEL: &str = "Disconnects";

#[tokio::main]
async fn main() {
    let tiers = [Tier::Layer];
    tokio::join!(
        compat::run_cases("axum", &tiers, &[Mode::Plain], on_axum),
        compat::run_cases("hyper", &tiers, &[Mode::Plain], on_hyper),
    );
}

/// Works in a task and never answers.
async fn handle(witness: Witness, token: Option<CallToken>) {
    tokio::spawn(async move {
        compat::work(&witness, LABEL, pending(), token).await;
    });
    pending().await
}

async fn on_axum(setup: Setup) -> SocketAddr {
    let witness = setup.witness.clone();
    let work = async move |token: Option<Extension<CallToken>>| {
        handle(witness, token.map(|Extension(token)| token)).await;
    };
    setup.serve(Router::new().route(PATH, get(work))).await
}

async fn on_hyper(setup: Setup) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it is bound");
    match setup.layer() {
        Some(layer) => {
            let service = layer.layer(service_fn(move |request| {
                work(setup.witness.clone(), request)
            }));
            tokio::spawn(accept(listener, service));
        }
        None => {
            let service = service_fn(move |request| work(setup.witness.clone(), request));
            tokio::spawn(accept(listener, service));
        }
    }
    address
}

async fn work<B>(
    witness: Witness,
    request: Request<B>,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let token = request.extensions().get::<CallToken>().cloned();
    handle(witness, token).await;
    Ok(Response::new(Empty::new()))
}

async fn accept<S, B>(listener: TcpListener, service: S)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    while let Ok((stream, _)) = listener.accept().await {
        let service = TowerToHyperService::new(service.clone());
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}
