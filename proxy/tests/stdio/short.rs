//! Sessions in an event store with almost no room left.

use http::StatusCode;
use mcp_cancel_proxy::{
    event_store::{EventStore, Limits},
    stdio::Stdio,
};

use crate::{client::*, server::*};

/// What the event store counts for a stream without events.
const STREAM: usize = 8 * 1024;
/// What it counts for a session, whose id of 32 characters counts twice.
const SESSION: usize = 1_024 + 2 * 32;

#[tokio::test]
async fn a_call_is_refused_before_it_reaches_the_server_or_gets_its_answer() {
    let mut refused = 0;
    // Room for the session's own stream and one more, with a few bytes to spare.
    for extra in (0..1_000).step_by(50) {
        let limits = Limits {
            bytes: SESSION + 2 * STREAM + extra,
            ..Limits::default()
        };
        let stdio = Stdio::new(scripted(&[]), EventStore::new(limits)).unwrap();
        let started = send(
            &stdio,
            post().body(initialize(WITH_PRIMING).into()).unwrap(),
        )
        .await;
        if started.status() == StatusCode::SERVICE_UNAVAILABLE {
            refused += 1;
            continue;
        }
        let session = started.headers()["mcp-session-id"]
            .to_str()
            .unwrap()
            .to_owned();
        let mut events = Events::of(started);
        assert!(events.answer().await["result"].is_object());
        let client = Client { stdio, session };
        // A stream may be evicted once it has been read to its end.
        assert!(events.rest().await.is_empty());
        let response = client
            .post(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pid"}}"#)
            .await;
        if response.status() == StatusCode::SERVICE_UNAVAILABLE {
            refused += 1;
            continue;
        }
        let answer = Events::of(response).answer().await;
        assert!(answer["result"].is_object(), "{extra}: {answer}");
    }
    assert!(0 < refused && refused < 20, "{refused}");
}
