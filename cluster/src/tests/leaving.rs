//! An instance goes in an orderly way.

use futures_util::FutureExt as _;
use serde_json::json;
use std::time::Duration;
use test_support::within;

use super::node::Node;
use crate::directory::{MemoryDirectory, faulty::Faulty};

/// The public side closes, calls end while peers still relay to them, the instance leaves: nobody loses an answer.
#[tokio::test]
async fn no_answer_is_lost_when_the_owner_goes() {
    let directory = Faulty::new(MemoryDirectory::default());
    let [mut a, b, c] = Node::several(&directory).await;
    let mcp = a.session().await;
    let mut through_b = b
        .client_of(&mcp)
        .call(1, "hold", json!({ "label": "first" }))
        .await;
    let cut = c
        .client_of(&mcp)
        .call(2, "hold", json!({ "label": "second" }))
        .await;
    a.witness.started("first").await;
    a.witness.started("second").await;
    let mut cut = cut;
    cut.head().await;
    let event = cut.event().await.unwrap();
    cut.fin();

    drop(a.public.take());
    let calls = a.calls.clone();
    let mut draining = Box::pin(calls.drain(Duration::from_secs(60)));
    assert!((&mut draining).now_or_never().is_none());
    // While it drains, peers come in as before: with a client that is back, and with a new call.
    let mut back = b.client_of(&mcp).resume(event.id.as_deref().unwrap()).await;
    assert_eq!(back.head().await.status, 200);
    let mut third = c
        .client_of(&mcp)
        .call(3, "hold", json!({ "label": "third" }))
        .await;
    a.witness.started("third").await;
    for label in ["first", "second", "third"] {
        a.witness.release(label);
    }
    within("the drain", draining).await;
    assert_eq!(through_b.answer().await.unwrap()["id"], 1);
    assert_eq!(back.answer_event().await.unwrap().json()["id"], 2);
    assert_eq!(third.answer().await.unwrap()["id"], 3);

    within("the instance to leave", a.cluster.leave(Duration::from_secs(10))).await;
    within("the listener for peers to end", &mut a.peers)
        .await
        .unwrap();
    let mut call = b
        .client_of(&mcp)
        .call(4, "echo", json!({ "text": "x" }))
        .await;
    assert_eq!(call.answer().await.unwrap()["id"], 4);
    assert!(b.has(&mcp));
    let mut call = c
        .client_of(&mcp)
        .call(5, "echo", json!({ "text": "x" }))
        .await;
    assert_eq!(call.answer().await.unwrap()["id"], 5);
    assert!(!c.has(&mcp));
}

/// A request that a peer still sends when the instance has begun to leave is not begun here, and not lost.
#[tokio::test]
async fn a_call_that_comes_while_the_owner_leaves_is_served_elsewhere() {
    let directory = Faulty::new(MemoryDirectory::default());
    let [a, b] = Node::several(&directory).await;
    let mcp = a.session().await;
    let mut held = b
        .client_of(&mcp)
        .call(1, "hold", json!({ "label": "held" }))
        .await;
    held.head().await;
    a.witness.started("held").await;
    let mut leaving = Box::pin(a.cluster.leave(Duration::from_secs(10)));
    assert!(
        (&mut leaving).now_or_never().is_none(),
        "a relay is under way"
    );

    let mut call = b
        .client_of(&mcp)
        .call(2, "echo", json!({ "text": "x" }))
        .await;
    assert_eq!(call.answer().await.unwrap()["id"], 2);
    assert!(b.has(&mcp));

    a.witness.release("held");
    assert_eq!(held.answer().await.unwrap()["id"], 1);
    within("the instance to leave", leaving).await;
}
