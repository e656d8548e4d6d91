//! Clients that are refused, that wait, or that are late: their calls are not cancelled, and their answers reach no other client.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
    routing::get,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::Grace;
use serde_json::json;
use test_support::{Mcp, PATH, within};
use tokio::time::sleep;
use tower_service::Service as _;

use super::{
    node::{Setup, pass},
    steps::{directory, post, run_other_tasks},
};
use crate::directory::{Directory as _, MemoryDirectory, faulty::Faulty};

const GRACE: Duration = Duration::from_secs(6);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// The application knows whose a session is. This one is not Bob's.
fn not_bobs(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let user = request.headers().get("authorization");
        if user.is_some_and(|user| user == "Bearer bob") {
            return StatusCode::FORBIDDEN.into_response();
        }
        next.run(request).await
    }))
}

/// A call waits for the transfer of its session, and the application refuses a cancel of it.
async fn waiting_call_after_a_refused_cancel(change: fn(&mut Request)) -> serde_json::Value {
    let directory = directory();
    let setup = || Setup {
        within: not_bobs,
        ..Setup::default()
    };
    let (a, b) = (
        setup().start(&directory).await,
        setup().start(&directory).await,
    );
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let at_b = b.client_of(&mcp);
    let mut first = at_b.call(1, "hold", json!({ "label": "first" })).await;
    assert_eq!(first.head().await.status, 200);
    a.witness.started("first").await;
    let cancel = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": 1 },
    });
    let mut refused = post(&mcp, &cancel);
    change(&mut refused);
    let refused = b.app.clone().call(refused).await.unwrap();
    assert!(refused.status().is_client_error(), "{refused:?}");
    run_other_tasks().await;
    assert!(a.witness.is_running("first"), "control: a running call");

    let _leaving = a.routing().shutdown.begin();
    let mut second = at_b.call(2, "echo", json!({ "text": "x" })).await;
    run_other_tasks().await;
    let cancel = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": 2 },
    });
    let mut refused = post(&mcp, &cancel);
    change(&mut refused);
    let refused = b.app.clone().call(refused).await.unwrap();
    assert!(refused.status().is_client_error(), "{refused:?}");
    run_other_tasks().await;
    a.witness.release("first");
    let head = within("a head", second.head()).await;
    assert_eq!(head.status, 200);
    let body = if head.header("content-type") == Some("application/json") {
        serde_json::from_slice(&second.body_to_end().await).unwrap()
    } else {
        within("an answer", second.answer()).await.unwrap()
    };
    drop(first);
    body
}

#[tokio::test]
async fn a_cancel_that_the_application_refuses_cancels_no_waiting_call() {
    let answer = waiting_call_after_a_refused_cancel(|request| {
        let bob = "Bearer bob".parse().unwrap();
        request.headers_mut().insert("authorization", bob);
    })
    .await;
    assert!(answer["result"].is_object(), "{answer}");
}

/// rmcp's own check against DNS rebinding.
#[tokio::test]
async fn a_cancel_for_another_host_cancels_no_waiting_call() {
    let answer = waiting_call_after_a_refused_cancel(|request| {
        let host = "evil.example".parse().unwrap();
        request.headers_mut().insert("host", host);
    })
    .await;
    assert!(answer["result"].is_object(), "{answer}");
}

/// The application checks the clients of its MCP endpoint, and has a stream of news for everybody.
fn news_for_everybody(app: Router) -> Router {
    let news = get(async || {
        let head = [("content-type", "text/event-stream")];
        (head, ": no news\n\n")
    });
    not_bobs(app).merge(Router::new().route("/news", news))
}

/// Bob knows the id of a session, which the application does not give him at its MCP endpoint. Another path
/// answers him with events. The rest of the event id he knows from a session of his own: the incarnation is the
/// same for all sessions of A, and its calls are numbered.
#[tokio::test]
async fn a_kept_answer_is_given_to_no_other_user_at_another_path() {
    let directory = directory();
    let setup = || Setup {
        within: news_for_everybody,
        ..Setup::default()
    };
    let (mut a, b) = (
        setup().start(&directory).await,
        setup().start(&directory).await,
    );
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let named = a.detach(&mcp, 1, "alice's").await;
    a.witness.release("alice's");
    a.witness.ended("alice's").await;
    pass(2 * SECOND).await;
    a.kill_and_expire().await;
    pass(4 * SECOND).await;

    let bob = async |path: &str| {
        let request = http::Request::get(path)
            .header("host", "localhost")
            .header("authorization", "Bearer bob")
            .header("accept", "text/event-stream")
            .header("mcp-session-id", mcp.session_id().unwrap())
            .header("last-event-id", &named)
            .body(Body::empty());
        let response = b.app.clone().call(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = within("a body", to_bytes(response.into_body(), 1 << 20)).await;
        (status, String::from_utf8(body.unwrap().to_vec()).unwrap())
    };
    assert_eq!(bob(PATH).await.0, 403, "control");
    let (status, body) = bob("/news").await;
    assert_eq!((status, &*body), (200, ": no news\n\n"));
}

/// B stalls for 3.5 s, less than its lease lasts. Meanwhile the client connects to B, within its grace, and resumes. When B runs again,
/// it first sends a heartbeat, and then reads the request, which it turns away. That heartbeat was sent more than 1.15 s after the
/// grace. No clock is paused here: B has a thread of its own, which sleeps.
#[tokio::test]
async fn a_client_that_waited_for_a_stalled_instance_in_its_grace_keeps_its_call() {
    let of_a = Faulty::new(MemoryDirectory::default());
    let of_b = Faulty::new(of_a.memory.clone());
    let setup = Setup {
        grace: Grace::After(GRACE),
        ..Setup::default()
    };
    let a = setup.start(&of_a).await;
    let (started, b) = tokio::sync::oneshot::channel();
    let (stall, mut stalls) = tokio::sync::mpsc::unbounded_channel::<Duration>();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let setup = Setup {
                // It does not reach A.
                filter: crate::relay::filter::PeersFilter::new(|_| false),
                ..Setup::default()
            };
            let b = setup.start(&of_b).await;
            started
                .send((b.public.as_ref().unwrap().addr, b.me.incarnation))
                .unwrap();
            while let Some(time) = stalls.recv().await {
                std::thread::sleep(time);
            }
        });
    });
    let (addr, incarnation) = b.await.unwrap();
    sleep(10 * SECOND).await;
    let mcp = a.session().await;
    let named = a.detach(&mcp, 1, "a").await;
    sleep(4_500 * MS).await;
    stall.send(3_500 * MS).unwrap();
    sleep(500 * MS).await;
    // 1 s before the end of the grace.
    let at_b = Mcp::stateless(addr, PATH).in_session(mcp.session_id().unwrap());
    let mut resumed = at_b.resume(&named).await;
    let head = tokio::time::timeout(5 * SECOND, resumed.head())
        .await
        .unwrap();
    assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    let leases = of_a.memory.leases().await.unwrap();
    assert!(leases.of(incarnation).is_some(), "B has its lease");
    let was_running = a.witness.is_running("a");
    sleep(SECOND).await;
    // The client retries, and reaches A this time.
    let mut again = mcp.resume(&named).await;
    let status = again.head().await.status;
    let is_running = a.witness.is_running("a");
    drop(stall);
    thread.join().unwrap();
    assert_eq!((was_running, status, is_running), (true, 200, true));
}
