//! New sessions when the session limit has been reached.

use std::time::Duration;

use http::StatusCode;
use mcp_cancel_proxy::stdio::{Options, Stdio};
use tokio::time::sleep;

use crate::{
    client::{Client, NOTIFICATION, WITHOUT_PRIMING, assert_refused, begin},
    server::{process_exists, scripted, serve, until_exited},
};

/// How long a session must have been unused before it may be ended to make room.
const MAKE_ROOM_AFTER: Duration = Duration::from_millis(600);

/// Returns the options for the scripted server with this session limit.
fn limited(max_sessions: usize) -> Options {
    let mut options = scripted(&[]);
    (options.max_sessions, options.make_room_after) = (max_sessions, MAKE_ROOM_AFTER);
    options
}

async fn two_clients(stdio: &Stdio) -> (Client, Client) {
    let first = Client::begin(stdio, WITHOUT_PRIMING).await;
    (first, Client::begin(stdio, WITHOUT_PRIMING).await)
}

#[tokio::test]
async fn the_session_that_was_unused_for_longest_makes_room() {
    let stdio = serve(limited(3));
    let listens = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let listening = listens.get(None).await;
    let (oldest, newer) = two_clients(&stdio).await;
    let (oldest_pid, newer_pid) = (oldest.pid().await, newer.pid().await);
    sleep(2 * MAKE_ROOM_AFTER).await;

    drop(Client::begin(&stdio, WITHOUT_PRIMING).await);

    until_exited(oldest_pid).await;
    assert!(stdio.ended_sessions().contains(&("made_room", 1)));
    assert!(process_exists(newer_pid));
    assert_eq!(oldest.notify(NOTIFICATION).await, StatusCode::NOT_FOUND);
    assert_eq!(newer.notify(NOTIFICATION).await, StatusCode::ACCEPTED);
    assert_eq!(listens.notify(NOTIFICATION).await, StatusCode::ACCEPTED);
    assert_eq!(stdio.stats().sessions, 3);
    drop(listening);
}

#[tokio::test]
async fn a_session_in_use_makes_no_room() {
    let stdio = serve(limited(2));
    let (listens, works) = two_clients(&stdio).await;
    let listening = listens.get(None).await;
    let mut working = works.call("1", "work", r#"{"seconds":2}"#).await;
    sleep(2 * MAKE_ROOM_AFTER).await;

    assert_refused(&begin(&stdio).await, "1");

    assert!(working.answer().await["result"].is_object());
    drop(listening);
}

/// The request might have a large argument and its client a slow network.
#[tokio::test]
async fn a_session_whose_request_is_arriving_makes_no_room() {
    let stdio = serve(limited(1));
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let meanwhile = async {
        sleep(2 * MAKE_ROOM_AFTER).await;
        begin(&stdio).await
    };

    let (status, refused) = client.post_slowly(NOTIFICATION, meanwhile).await;

    assert_refused(&refused, "1");
    assert_eq!(status, StatusCode::ACCEPTED);
}

/// The client may be about to reconnect.
#[tokio::test]
async fn a_session_makes_no_room_at_once_when_its_client_has_disconnected_or_has_its_answer() {
    let stdio = serve(limited(2));
    let (listens, works) = two_clients(&stdio).await;
    let listening = listens.get(None).await;
    let mut working = works.call("1", "work", r#"{"seconds":1}"#).await;
    sleep(MAKE_ROOM_AFTER).await;
    assert!(working.answer().await["result"].is_object());
    drop((listening, working));

    assert_refused(&begin(&stdio).await, "1");

    sleep(2 * MAKE_ROOM_AFTER).await;
    assert_eq!(begin(&stdio).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn each_new_session_replaces_one() {
    let stdio = serve(limited(3));
    for _ in 0..3 {
        drop(Client::begin(&stdio, WITHOUT_PRIMING).await);
    }
    sleep(2 * MAKE_ROOM_AFTER).await;

    let (first, second) = tokio::join!(begin(&stdio), begin(&stdio));

    assert_eq!(
        (first.status(), second.status()),
        (StatusCode::OK, StatusCode::OK)
    );
    assert_eq!(stdio.stats().sessions, 3);
    drop((first, second));
}

#[tokio::test]
async fn a_process_that_is_ending_makes_room_before_another_session() {
    let stdio = serve(limited(2));
    let (deleted, kept) = two_clients(&stdio).await;
    let pid = kept.pid().await;
    sleep(2 * MAKE_ROOM_AFTER).await;
    assert_eq!(deleted.delete().await, StatusCode::NO_CONTENT);

    assert_eq!(begin(&stdio).await.status(), StatusCode::OK);

    assert!(process_exists(pid));
    assert_eq!(stdio.stats().sessions, 2);
}
