use std::net::Ipv4Addr;

use tokio::time::{sleep, timeout};

use super::*;
use crate::ids::Incarnation;

fn hash(id: &str) -> SessionHash {
    SessionHash::of(id)
}

fn params() -> Arc<[u8]> {
    Arc::from(*b"{}")
}

fn other() -> Owner {
    Owner {
        address: (Ipv4Addr::LOCALHOST, 9000).into(),
        incarnation: Incarnation::random(),
    }
}

fn names(batch: &Batch) -> Vec<SessionHash> {
    batch.iter().map(|(session, _)| *session).collect()
}

/// Some that are open, initialized and written.
fn written(ids: &[&str]) -> (Arc<Sessions>, mpsc::UnboundedReceiver<Lost>) {
    let (sessions, lost) = Sessions::new();
    for id in ids {
        sessions.opened(id);
        sessions.initialized(id, params());
    }
    let batch = sessions.take_batch();
    assert_eq!(batch.len(), ids.len());
    sessions.wrote(&batch, &[]);
    (sessions, lost)
}

#[test]
fn a_session_lives_here_until_it_is_closed() {
    let (sessions, _lost) = Sessions::new();
    assert!(!sessions.is_here(hash("a")));
    sessions.opened("a");
    assert!(sessions.is_here(hash("a")) && !sessions.is_here(hash("b")));
    assert_eq!(sessions.len(), 1);
    sessions.closed("a");
    assert!(!sessions.is_here(hash("a")));
}

#[test]
fn a_session_is_written_once_its_parameters_are_known() {
    let (sessions, _lost) = Sessions::new();
    sessions.opened("a");
    assert_eq!(sessions.take_batch(), []);
    sessions.initialized("a", params());
    assert_eq!(sessions.take_batch(), [(hash("a"), params())]);
    assert_eq!(sessions.take_batch(), []);
}

#[test]
fn a_session_that_could_not_be_written_comes_again() {
    let (sessions, _lost) = Sessions::new();
    sessions.initialized("a", params());
    let batch = sessions.take_batch();
    sessions.put_back(&batch);
    assert!(sessions.is_behind());
    assert_eq!(names(&sessions.take_batch()), [hash("a")]);
}

#[test]
fn a_session_that_was_closed_meanwhile_is_not_written_again() {
    let (sessions, _lost) = Sessions::new();
    sessions.initialized("a", params());
    let batch = sessions.take_batch();
    sessions.closed("a");
    sessions.put_back(&batch);
    assert_eq!(sessions.take_batch(), []);
}

#[test]
fn new_sessions_come_before_those_that_are_written_again() {
    let (sessions, _lost) = written(&["old"]);
    sessions.write_all_again();
    sessions.initialized("new", params());
    assert_eq!(names(&sessions.take_batch()), [hash("new"), hash("old")]);
    assert!(!sessions.is_behind());
}

#[test]
fn all_are_written_again_once_however_often_that_is_asked() {
    let (sessions, _lost) = written(&["a", "b"]);
    sessions.write_all_again();
    sessions.write_all_again();
    assert_eq!(sessions.take_batch().len(), 2);
    assert_eq!(sessions.take_batch(), []);
}

#[test]
fn a_batch_is_bounded_by_number_and_by_size() {
    let (sessions, _lost) = Sessions::new();
    for id in 0..300 {
        sessions.initialized(&id.to_string(), params());
    }
    let sizes: Vec<usize> = (0..4).map(|_| sessions.take_batch().len()).collect();
    assert_eq!(sizes, [MAX_BATCH, MAX_BATCH, 300 - 2 * MAX_BATCH, 0]);
    for id in 0..20 {
        sessions.initialized(&format!("large {id}"), vec![b' '; 64 * 1024].into());
    }
    assert_eq!(sessions.take_batch().len(), 4);
}

#[test]
fn a_session_that_is_anothers_is_told_once_and_lives_here_no_more() {
    let (sessions, mut lost) = written(&["a", "b"]);
    let owner = other();
    sessions.write_all_again();
    let batch = sessions.take_batch();
    sessions.wrote(&batch, &[(hash("a"), owner), (hash("never here"), owner)]);
    let told = lost.try_recv().unwrap();
    assert_eq!(
        (&*told.id, told.session, told.to),
        ("a", hash("a"), To::Owner(owner))
    );
    assert!(lost.try_recv().is_err());
    assert!(!sessions.is_here(hash("a")) && sessions.is_here(hash("b")));
    sessions.lose(hash("a"), owner);
    assert!(lost.try_recv().is_err());
}

#[test]
fn no_id_is_shown_for_debugging() {
    let (sessions, mut lost) = written(&["secret"]);
    sessions.lose(hash("secret"), other());
    let told = lost.try_recv().unwrap();
    assert!(!format!("{sessions:?} {told:?}").contains("secret"));
}

#[test]
fn a_deleted_session_is_told_of_until_it_is_removed() {
    let (sessions, _lost) = written(&["a"]);
    sessions.write_all_again();
    sessions.deleted("a");
    assert!(!sessions.is_here(hash("a")));
    assert_eq!(
        sessions.take_batch(),
        [],
        "nothing of it is written after that"
    );
    assert_eq!(sessions.deleted_sessions(), [hash("a")]);
    sessions.removed(hash("a"));
    assert_eq!(sessions.deleted_sessions(), []);
}

#[test]
fn deleted_sessions_are_bounded() {
    let (sessions, _lost) = Sessions::new();
    for id in 0..MAX_DELETED + 10 {
        sessions.deleted(&id.to_string());
    }
    assert_eq!(sessions.work().deleted.len(), MAX_DELETED);
    assert_eq!(sessions.deleted_sessions()[0], hash("10"));
}

#[tokio::test(start_paused = true)]
async fn a_session_is_written_again_after_twenty_minutes_and_not_before() {
    let (sessions, _lost) = written(&["a"]);
    sleep(REFRESHED_AFTER - Duration::from_millis(1)).await;
    sessions.refresh();
    assert_eq!(sessions.take_batch(), []);
    sleep(Duration::from_millis(1)).await;
    sessions.refresh();
    assert_eq!(names(&sessions.take_batch()), [hash("a")]);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_loaded_and_never_opened_is_forgotten() {
    let (sessions, _lost) = Sessions::new();
    sessions.loaded("a", params());
    sessions.loaded("b", params());
    sessions.opened("b");
    assert_eq!(
        names(&sessions.take_batch()),
        [hash("b")],
        "a restored session is written"
    );
    sleep(RESTORED_WITHIN).await;
    sessions.refresh();
    assert!(!sessions.is_here(hash("a")) && sessions.is_here(hash("b")));
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_session_to_be_written_is_told() {
    let (sessions, _lost) = Sessions::new();
    sessions.initialized("a", params());
    let second = Duration::from_secs(1);
    let waits = async || {
        timeout(second, sessions.until_written(hash("a")))
            .await
            .is_err()
    };
    assert!(waits().await);
    let batch = sessions.take_batch();
    let (waited, ()) = tokio::join!(waits(), async { sessions.wrote(&batch, &[]) });
    assert!(!waited);
    sessions.closed("a");
    assert!(!waits().await, "nobody waits for a session that is gone");
}

#[test]
fn a_session_is_given_to_its_client_once_it_is_written_or_if_it_never_is() {
    let (sessions, mut lost) = written(&["written"]);
    sessions.opened("without parameters");
    for id in ["written", "without parameters", "of nobody"] {
        assert!(sessions.hand_out(id), "{id}");
    }
    assert!(lost.try_recv().is_err());

    sessions.opened("unwritten");
    sessions.initialized("unwritten", params());
    assert!(!sessions.hand_out("unwritten"));
    let told = lost.try_recv().unwrap();
    assert_eq!((&*told.id, told.to), ("unwritten", To::Nobody));
    assert!(!sessions.is_here(hash("unwritten")));
    assert_eq!(sessions.take_batch(), []);
    assert_eq!(sessions.deleted_sessions(), [], "nobody was told of it");
}

#[test]
fn a_session_that_is_on_its_way_to_the_directory_when_it_is_refused_is_removed_there() {
    for is_written in [true, false] {
        let (sessions, _lost) = Sessions::new();
        sessions.opened("a");
        sessions.initialized("a", params());
        let batch = sessions.take_batch();
        assert!(!sessions.hand_out("a"));
        if is_written {
            sessions.wrote(&batch, &[])
        } else {
            sessions.put_back(&batch)
        }
        assert!(!sessions.is_here(hash("a")));
        assert_eq!(sessions.deleted_sessions(), [hash("a")]);
        assert_eq!(sessions.take_batch(), []);
    }
}

#[test]
fn a_session_is_given_up_only_if_its_door_is_shut() {
    let (sessions, mut lost) = written(&["a"]);
    sessions.give_up(hash("a"));
    assert!(lost.try_recv().is_err() && sessions.has("a"));
    sessions.door("a").unwrap().shut();
    assert!(!sessions.has("a") && sessions.enter("a").is_none());
    sessions.give_up(hash("a"));
    sessions.give_up(hash("a"));
    let given_up = lost.try_recv().unwrap();
    assert_eq!((&*given_up.id, given_up.to), ("a", To::WhoeverAsks));
    assert!(lost.try_recv().is_err());

    // It has come back.
    sessions.opened("a");
    sessions.give_up(hash("a"));
    assert!(lost.try_recv().is_err() && sessions.enter("a").is_some());
}
