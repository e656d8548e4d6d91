//! Layers of the application inside the cluster's layer: what they may delay.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::Response,
};
use serde_json::json;
use test_support::within;

use super::{
    node::{Setup, pass},
    steps::directory,
};

const SECOND: Duration = Duration::from_secs(1);

/// Reads each response completely before it passes the response on, for example to log or to sign it.
fn hold_responses(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = next.run(request).await.into_parts();
        let whole = to_bytes(body, usize::MAX).await.unwrap_or_default();
        Ok::<_, Infallible>(Response::from_parts(head, Body::from(whole)))
    }))
}

/// Makes a call of a session that runs for long. Returns the statuses of a second call and of a cancel.
async fn statuses_beside_a_long_call(is_restored: bool) -> [u16; 2] {
    let directory = directory();
    let [mut a, b] = Setup::start_pair(&directory, hold_responses).await;
    let mcp = if is_restored {
        let mcp = a.session().await;
        a.kill_and_expire().await;
        pass(2 * SECOND).await;
        mcp
    } else {
        b.session().await
    };
    let client = b.client_of(&mcp);
    let _long = client.call(1, "hold", json!({ "label": "long" })).await;
    within("the call", b.witness.started("long")).await;
    let mut second = client.call(2, "echo", json!({ "text": "x" })).await;
    let second = within("a head", second.head()).await.status;
    let cancel = within("a head", client.cancel(1)).await;
    [second, cancel]
}

/// The first request after the death of an instance restores its session, and is a long call. The other requests do not wait for its head.
#[tokio::test]
async fn a_long_call_that_restores_its_session_delays_no_other_request() {
    for is_restored in [false, true] {
        let statuses = statuses_beside_a_long_call(is_restored).await;
        assert_eq!((is_restored, statuses), (is_restored, [200, 202]));
    }
}

/// The restore has ended, and its call has no head yet. A shutdown waits for the call.
#[tokio::test]
async fn a_long_call_that_has_restored_its_session_is_in_flight_for_a_shutdown() {
    let directory = directory();
    let [mut a, b] = Setup::start_pair(&directory, hold_responses).await;
    let mcp = a.session().await;
    a.kill_and_expire().await;
    pass(2 * SECOND).await;
    let client = b.client_of(&mcp);
    let mut long = client.call(1, "hold", json!({ "label": "long" })).await;
    within("the call", b.witness.started("long")).await;
    assert!(b.routing().restores.is_empty(), "the restore has ended");
    let cluster = b.cluster.clone();
    let shutdown = tokio::spawn(async move { cluster.leave(60 * SECOND).await });
    pass(5 * SECOND).await;
    assert!(!shutdown.is_finished());
    b.witness.release("long");
    assert_eq!(within("an answer", long.answer()).await.unwrap()["id"], 1);
    assert_eq!(within("the shutdown", shutdown).await.unwrap(), 0);
}
