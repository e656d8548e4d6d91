//! A route without MCP whose handler has spawned work, over a real socket.

use axum::{Router, routing::get};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason};
use tokio::sync::mpsc;

use crate::support::*;

/// What the work and its clean-up report.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Begun,
    Stopped,
    CleanedUp(CancelReason),
}

#[tokio::test]
async fn work_that_a_handler_spawned_stops_and_is_cleaned_up_after() {
    let (served, mut told) = start().await;
    let mut reader = Connection::open(served.addr).await;
    reader.send(&Request::new("GET", "/waits")).await;
    assert_eq!(next(&mut told).await, Told::Begun);

    reader.fin();

    let both = [next(&mut told).await, next(&mut told).await];
    assert!(both.contains(&Told::Stopped), "{both:?}");
    let cleaned_up = Told::CleanedUp(CancelReason::ClientDisconnected);
    assert!(both.contains(&cleaned_up), "{both:?}");
}

#[tokio::test]
async fn a_response_that_was_read_needs_no_clean_up() {
    let (served, mut told) = start().await;

    let reply = Connection::fetch(served.addr, &Request::new("GET", "/answers")).await;

    assert_eq!(reply.text(), "done");
    assert_eq!(next(&mut told).await, Told::Begun);
    drop(served);
    assert_eq!(within("the routes to go", told.recv()).await, None);
}

async fn next(told: &mut mpsc::UnboundedReceiver<Told>) -> Told {
    within("a report", told.recv())
        .await
        .expect("the routes are there")
}

async fn start() -> (Served, mpsc::UnboundedReceiver<Told>) {
    let (tell, told) = mpsc::unbounded_channel();
    let answering = tell.clone();
    let routes = Router::new()
        .route(
            "/waits",
            get(async move |call: CallToken| {
                begin(&call, &tell);
                work(call, tell);
                std::future::pending::<()>().await
            }),
        )
        .route(
            "/answers",
            get(async move |call: CallToken| {
                begin(&call, &answering);
                "done"
            }),
        );
    (
        serve(routes.layer(CancelOnDisconnectLayer::new())).await,
        told,
    )
}

fn begin(call: &CallToken, tell: &mpsc::UnboundedSender<Told>) {
    let clean_up = tell.clone();
    call.on_cancel(async move |reason| {
        clean_up
            .send(Told::CleanedUp(reason))
            .expect("the test listens");
    });
    tell.send(Told::Begun).expect("the test listens");
}

#[allow(
    clippy::disallowed_methods,
    reason = "the work is in a task of its own"
)]
fn work(call: CallToken, tell: mpsc::UnboundedSender<Told>) {
    tokio::spawn(async move {
        call.cancelled().await;
        tell.send(Told::Stopped).expect("the test listens");
    });
}
