//! JSON-RPC batches, which only revision 2025-03-26 has.
//!
//! They pass unchanged, carry no call, and are never cancelled.
//!
//! rmcp does not accept batches. The server behind the layer accepts everything, and works in its own task.

use std::convert::Infallible;

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::stream;
use mcp_cancel_on_disconnect::{CallToken, Grace, observe::ParseFailure};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use crate::{
    setup::{EXCHANGE, EventKind, GRACE, Plan, Server, Setup, StoppedClock},
    support::*,
};

const NAME: &str = "the batch";

/// When the server answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Answers {
    /// At once, with a stream.
    Early,
    /// Only when the work is done.
    Late,
}

/// What the server does for a request.
struct Job {
    body: Bytes,
    token: CallToken,
    /// Ends the stream when it is dropped.
    events: mpsc::UnboundedSender<Bytes>,
    finish: oneshot::Sender<()>,
    work: JoinHandle<&'static str>,
}

#[tokio::test]
async fn a_batch_and_its_answer_pass_unchanged() {
    let (setup, mut jobs) = start(Answers::Early).await;
    for (number, mcp) in clients(&setup).into_iter().enumerate() {
        let text = format!(" {}\r\n", batch(&mcp));
        let mut client = mcp.send(&mcp.post_request(text.clone())).await;
        let job = next(&mut jobs).await;
        assert_eq!(job.body, text);
        let answers = json!([answer(json!(1)), answer(json!("two"))]);

        let event = format!("id: 1\ndata: {answers}\n\n");
        job.events.send(event.into()).expect("the stream is open");

        assert_eq!(client.head().await.status, 200);
        assert_eq!(client.answer().await, Some(answers));
        assert!(setup.calls.is_empty());
        let unknown = vec![EventKind::UnparsedBody(ParseFailure::Batch); number + 1];
        assert_eq!(setup.events.all(), unknown);
    }
}

#[tokio::test]
async fn the_work_for_a_batch_keeps_running_after_a_disconnect() {
    let clock = StoppedClock::stop();
    for answers in [Answers::Early, Answers::Late] {
        let (setup, mut jobs) = start(answers).await;
        for (number, mcp) in clients(&setup).into_iter().enumerate() {
            let name = format!("{NAME} {number}");
            let mcp = mcp.header(EXCHANGE, &name);
            let mut client = mcp.send(&mcp.post_request(batch(&mcp).to_string())).await;
            let job = next(&mut jobs).await;
            if answers == Answers::Early {
                client.head().await;
            }

            client.fin();

            setup.exchanges.over_for(&name).await;
            clock.advance(GRACE * 2).await;
            assert!(!job.token.is_cancelled(), "{answers:?} {name}");
            job.finish.send(()).expect("the work is waiting");
            let end = within("the work to end", job.work).await;
            assert_eq!(end.expect("the work does not panic"), "done");
        }
        let reported = setup.events.all();
        assert_eq!(
            reported,
            [EventKind::UnparsedBody(ParseFailure::Batch); 3],
            "{answers:?}"
        );
    }
}

/// Starts a server behind the layer that accepts every request.
#[allow(clippy::disallowed_methods, reason = "the test needs its own tasks")]
async fn start(answers: Answers) -> (Setup, mpsc::UnboundedReceiver<Job>) {
    let (take, jobs) = mpsc::unbounded_channel();
    let route = post(
        async move |Extension(token): Extension<CallToken>, body: Bytes| {
            let (finish, finished) = oneshot::channel();
            let (events, given) = mpsc::unbounded_channel();
            let stopped = token.clone();
            let work = tokio::spawn(async move {
                tokio::select! {
                    () = stopped.cancelled() => "stopped",
                    _ = finished => "done",
                }
            });
            let job = Job {
                body,
                token,
                events,
                finish,
                work,
            };
            take.send(job).expect("the test is listening");
            match answers {
                Answers::Early => event_stream(given),
                Answers::Late => std::future::pending().await,
            }
        },
    );
    let router = Router::new().route(PATH, route);
    let plan = Plan::of(Server::LayerOnly).grace(Grace::After(GRACE));
    (plan.inside(|_| router).start().await, jobs)
}

fn event_stream(events: mpsc::UnboundedReceiver<Bytes>) -> Response {
    let events = stream::unfold(events, async |mut events| {
        let event = events.recv().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    let content_type = [("content-type", "text/event-stream")];
    (content_type, Body::from_stream(events)).into_response()
}

async fn next(jobs: &mut mpsc::UnboundedReceiver<Job>) -> Job {
    within("a request", jobs.recv())
        .await
        .expect("the server is running")
}

/// Returns clients with and without a session.
///
/// Two are at a revision that has sessions, and one is at a revision that has none.
fn clients(setup: &Setup) -> [Mcp; 3] {
    let mcp = |version| Mcp::stateless(setup.served.addr, PATH).version(version);
    [
        mcp("2025-03-26").in_session("the session"),
        mcp("2025-03-26"),
        mcp("2026-07-28"),
    ]
}

/// Returns two requests and a notification.
fn batch(mcp: &Mcp) -> Value {
    json!([
        mcp.call_message(1, "hold", json!({})),
        { "jsonrpc": "2.0", "method": "notifications/roots/list_changed" },
        mcp.call_message("two", "hold", json!({})),
    ])
}

fn answer(id: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "result": {} })
}
