//! What else happens to a session while it changes hands.

use serde_json::json;
use test_support::within;
use tokio::task::yield_now;

use super::node::{Node, hash};
use crate::directory::{Claim, Directory as _, MemoryDirectory, faulty::Faulty};

fn directory() -> Faulty {
    Faulty::new(MemoryDirectory::default())
}

async fn all_else() {
    for _ in 0..1_000 {
        yield_now().await;
    }
}

/// Its session is closed while it waits for a call without a client, be it by the server or because it is another's.
#[tokio::test]
async fn a_call_that_waits_for_a_session_that_ends_goes_on_elsewhere() {
    let directory = directory();
    let [a, b, c] = Node::several(&directory).await;
    let mcp = a.session().await;
    a.detach(&mcp, 1, "first").await;
    let _leaving = a.routing().departure.begin();
    let mut second = b
        .client_of(&mcp)
        .call(2, "echo", json!({ "text": "x" }))
        .await;
    all_else().await;
    assert!(a.has(&mcp));
    let memory = &directory.memory;
    let claimed = memory.claim(hash(&mcp), a.me, c.me).await.unwrap();
    assert_eq!(claimed, Claim::Won);
    a.routing().sessions.lose(hash(&mcp), c.me);
    let answer = within("an answer", second.answer()).await;
    assert_eq!(answer.unwrap()["id"], 2);
    assert!(!a.has(&mcp) && b.has(&mcp) != c.has(&mcp));
}
