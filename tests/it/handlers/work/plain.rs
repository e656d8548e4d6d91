//! A route without MCP whose handler has spawned work, over a real socket.

use axum::{Router, routing::get};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason};
use tokio::sync::mpsc;

use crate::support::*;

/// What the work and its clean-up report.
#[derive(Debug, PartialEq, Eq)]
enum Report {
    Started,
    Stopped,
    CleanedUp(CancelReason),
}

#[tokio::test]
async fn work_that_a_handler_spawned_stops_and_is_cleaned_up_after() {
    let (served, mut reports) = start().await;
    let mut reader = Connection::open(served.addr).await;
    reader.send(&Request::new("GET", "/waits")).await;
    assert_eq!(next(&mut reports).await, Report::Started);

    reader.fin();

    let both = [next(&mut reports).await, next(&mut reports).await];
    assert!(both.contains(&Report::Stopped), "{both:?}");
    let cleaned_up = Report::CleanedUp(CancelReason::ClientDisconnected);
    assert!(both.contains(&cleaned_up), "{both:?}");
}

#[tokio::test]
async fn a_response_that_was_read_needs_no_clean_up() {
    let (served, mut reports) = start().await;

    let reply = Connection::fetch(served.addr, &Request::new("GET", "/answers")).await;

    assert_eq!(reply.text(), "done");
    assert_eq!(next(&mut reports).await, Report::Started);
    drop(served);
    assert_eq!(
        within("the routes to be dropped", reports.recv()).await,
        None
    );
}

async fn next(reports: &mut mpsc::UnboundedReceiver<Report>) -> Report {
    within("a report", reports.recv())
        .await
        .expect("the routes are still served")
}

async fn start() -> (Served, mpsc::UnboundedReceiver<Report>) {
    let (sender, reports) = mpsc::unbounded_channel();
    let answering = sender.clone();
    let routes = Router::new()
        .route(
            "/waits",
            get(async move |call: CallToken| {
                begin(&call, &sender);
                work(call, sender);
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
        reports,
    )
}

fn begin(call: &CallToken, sender: &mpsc::UnboundedSender<Report>) {
    let clean_up = sender.clone();
    call.on_cancel(async move |reason| {
        clean_up
            .send(Report::CleanedUp(reason))
            .expect("the test is listening");
    });
    sender.send(Report::Started).expect("the test is listening");
}

#[allow(clippy::disallowed_methods, reason = "the work needs its own task")]
fn work(call: CallToken, sender: mpsc::UnboundedSender<Report>) {
    tokio::spawn(async move {
        call.cancelled().await;
        sender.send(Report::Stopped).expect("the test is listening");
    });
}
