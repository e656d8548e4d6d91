use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use super::{
    queues::{Batch, MAX_DELETED},
    state::RESTORE_TIMEOUT,
    writing::{MAX_BATCH, REFRESH_INTERVAL},
    *,
};
use crate::ids::{Epoch, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone};

fn hash(id: &str) -> SessionHash {
    SessionHash::of(id)
}

fn me() -> Incarnation {
    Incarnation::random()
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

fn hashes(batch: &Batch) -> Vec<SessionHash> {
    batch
        .sessions
        .iter()
        .map(|registration| registration.session)
        .collect()
}

/// Returns the next batch of sessions to write. Panics if the next work is a deletion.
fn next(sessions: &Sessions) -> Option<Batch> {
    assert!(sessions.next_deletions().is_none());
    match sessions.next_entries()? {
        Work::Register(batch) => Some(batch),
        Work::Delete(..) => panic!("a deletion"),
    }
}

/// Returns the sessions to be written next and reports them as written.
fn write_next(sessions: &Sessions) -> Vec<SessionHash> {
    let batch = next(sessions);
    let hashes = batch.as_ref().map(hashes).unwrap_or_default();
    if let Some(batch) = batch {
        sessions.on_written(batch, &[]);
    }
    hashes
}

/// Returns the deletions to be written next. Reports them as failed, so they stay due.
fn deletions(sessions: &Sessions) -> Vec<SessionHash> {
    let mut deleted = Vec::new();
    while let Some(Work::Delete(batch)) = sessions.next_deletions() {
        deleted.extend(batch.into_iter().map(|(session, _)| session));
    }
    for session in &deleted {
        sessions.on_deletion_result(*session, false);
    }
    deleted
}

/// Returns sessions that are open, initialized and written.
fn written_sessions(ids: &[&str]) -> (Arc<Sessions>, mpsc::UnboundedReceiver<Relinquished>) {
    let (sessions, relinquished_sessions) = Sessions::new(me());
    for id in ids {
        sessions.on_opened(id, false);
        sessions.begin(id, params());
    }
    assert_eq!(write_next(&sessions).len(), ids.len());
    (sessions, relinquished_sessions)
}

#[test]
fn a_session_is_local_until_it_is_closed() {
    let (sessions, _relinquished) = Sessions::new(me());
    assert!(!sessions.is_local(hash("a")));
    sessions.on_opened("a", false);
    assert!(sessions.is_local(hash("a")) && !sessions.is_local(hash("b")));
    assert_eq!(sessions.len(), 1);
    sessions.on_closed("a");
    assert!(!sessions.is_local(hash("a")));
}

#[test]
fn a_session_is_written_once_its_parameters_are_known() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.on_opened("a", false);
    assert_eq!(write_next(&sessions), []);
    sessions.on_initialized("a", params());
    assert_eq!(write_next(&sessions), [hash("a")]);
    assert_eq!(write_next(&sessions), []);
}

#[test]
fn a_session_whose_write_failed_is_queued_again() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.begin("a", params());
    for _ in 0..2 {
        let batch = next(&sessions).unwrap();
        sessions.requeue(batch);
    }
    sessions.write_all_again();
    assert_eq!(write_next(&sessions), [hash("a")]);
}

#[test]
fn a_session_closed_in_the_meantime_is_not_written_again() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.begin("a", params());
    let batch = next(&sessions).unwrap();
    sessions.on_closed("a");
    sessions.requeue(batch);
    assert_eq!(write_next(&sessions), []);
}

#[test]
fn new_sessions_are_written_before_those_that_are_written_again() {
    let (sessions, _relinquished) = written_sessions(&["old"]);
    sessions.write_all_again();
    sessions.begin("new", params());
    assert_eq!(write_next(&sessions), [hash("new")]);
    assert!(sessions.has_unconfirmed());
    let old = next(&sessions).unwrap();
    assert_eq!(hashes(&old), [hash("old")]);
    assert!(sessions.has_unconfirmed(), "the write is not confirmed yet");
    sessions.on_written(old, &[]);
    assert!(!sessions.has_unconfirmed());
}

#[test]
fn all_sessions_are_written_again_once_even_if_requested_twice() {
    let (sessions, _relinquished) = written_sessions(&["a", "b"]);
    sessions.write_all_again();
    sessions.write_all_again();
    assert_eq!(write_next(&sessions).len(), 2);
    assert_eq!(write_next(&sessions), []);
}

#[test]
fn a_batch_is_bounded_by_number_and_by_size() {
    let (sessions, _relinquished) = Sessions::new(me());
    for id in 0..300 {
        sessions.begin(&id.to_string(), params());
    }
    let sizes: Vec<usize> = (0..4).map(|_| write_next(&sessions).len()).collect();
    assert_eq!(sizes, [MAX_BATCH, MAX_BATCH, 300 - 2 * MAX_BATCH, 0]);
    for id in 0..20 {
        sessions.begin(&format!("large {id}"), vec![b' '; 64 * 1024].into());
    }
    assert_eq!(write_next(&sessions).len(), 4);
}

#[test]
fn a_session_whose_record_has_a_higher_epoch_is_contested_until_its_owner_is_decided() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["a", "b", "c"]);
    let other = Ownership::begin(other());
    sessions.write_all_again();
    let batch = next(&sessions).unwrap();
    let differing = ["a", "b", "never local"].map(|id| (hash(id), Record::Owned(other)));
    sessions.on_written(batch, &differing);
    let mut contested = sessions.contested();
    contested.sort_by_key(|(session, _)| *session != hash("a"));
    assert_eq!(contested, [(hash("a"), other), (hash("b"), other)]);
    let verified = ["a", "b", "c"].map(|id| sessions.is_verified(hash(id), None));
    assert_eq!(verified, [false, false, true]);
    assert!(sessions.is_local(hash("a")) && relinquished_sessions.try_recv().is_err());

    sessions.relinquish_to_owner(hash("a"), other.owner);
    let relinquished = relinquished_sessions.try_recv().unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("a", RelinquishedTo::Owner(other.owner))
    );
    sessions.on_claimed(hash("b"), other.epoch.next());
    assert!(relinquished_sessions.try_recv().is_err() && !sessions.is_local(hash("a")));
    assert!(!sessions.has_contested() && sessions.is_verified(hash("b"), None));
    sessions.relinquish_to_owner(hash("a"), other.owner);
    assert!(relinquished_sessions.try_recv().is_err(), "only once");
    // The session is written at the claim's epoch.
    sessions.write_again(hash("b"));
    let batch = next(&sessions).unwrap();
    assert!(batch.sessions[0].epoch > other.epoch);
}

#[test]
fn a_session_that_was_ended_elsewhere_is_relinquished_as_ended() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["a"]);
    sessions.write_all_again();
    let batch = next(&sessions).unwrap();
    let tombstone = Tombstone {
        by: Incarnation::random(),
        epoch: Epoch::now(),
    };
    sessions.on_written(batch, &[(hash("a"), Record::Deleted(tombstone))]);
    assert_eq!(
        relinquished_sessions.try_recv().unwrap().to,
        RelinquishedTo::Ended
    );
    assert!(!sessions.is_local(hash("a")));
}

#[tokio::test(start_paused = true)]
async fn a_session_is_verified_by_a_later_write_with_the_new_epoch_if_one_is_due() {
    let (sessions, _relinquished) = written_sessions(&["a"]);
    sessions.on_opened("without parameters", false);
    let since = Instant::now() + Duration::from_secs(1);
    sleep(Duration::from_secs(2)).await;
    let is_verified = |id| sessions.is_verified(hash(id), Some(Lapse::by_failures(since)));
    assert!(!is_verified("a") && is_verified("without parameters"));
    sessions.write_all_again();
    let batch = next(&sessions).unwrap();
    sessions.renew_all();
    sessions.on_written(batch, &[]);
    assert!(
        !is_verified("a"),
        "another instance may still claim on the record that it has read"
    );
    let batch = next(&sessions).unwrap();
    assert!(batch.sessions[0].renewed > Some(batch.sessions[0].epoch));
    // All are renewed once more before the write is reported.
    sleep(Duration::from_millis(1)).await;
    sessions.renew_all();
    sessions.on_written(batch, &[]);
    assert!(!is_verified("a"));
    let batch = next(&sessions).unwrap();
    assert!(batch.sessions[0].renewed.is_some());
    sessions.on_written(batch, &[]);
    assert!(is_verified("a"));

    sleep(Duration::from_secs(2)).await;
    let is_verified = |lapse| sessions.is_verified(hash("a"), Some(lapse));
    let since = Instant::now();
    assert!(!is_verified(Lapse::by_failures(since)));
    sessions.write_all_again();
    assert_eq!(write_next(&sessions), [hash("a")]);
    assert!(
        is_verified(Lapse::by_failures(since)),
        "no new epoch is due"
    );
    assert!(!is_verified(Lapse::by_stall(since)));
}

#[test]
fn an_epoch_that_was_taken_without_a_reply_is_not_the_next_one() {
    let (sessions, _relinquished) = written_sessions(&["a"]);
    sessions.renew_all();
    let unanswered = next(&sessions).unwrap();
    let taken = Ownership {
        owner: Owner {
            incarnation: sessions.this_instance,
            ..other()
        },
        epoch: unanswered.sessions[0].renewed.unwrap(),
    };
    sessions.requeue(unanswered);
    let batch = next(&sessions).unwrap();
    sessions.on_written(batch, &[(hash("a"), Record::Owned(taken))]);
    let batch = next(&sessions).unwrap();
    assert_eq!(batch.sessions[0].epoch, taken.epoch);
    assert!(batch.sessions[0].renewed > Some(taken.epoch));
    sessions.on_written(batch, &[]);
    assert!(next(&sessions).is_none() && !sessions.has_unconfirmed());
}

#[test]
fn a_session_whose_handler_refused_it_is_not_local() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.on_opened("refused", false);
    sessions.on_closed("refused");
    sessions.on_initialized("refused", params());
    assert!(!sessions.is_local(hash("refused")) && next(&sessions).is_none());
}

#[test]
fn no_id_is_shown_for_debugging() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["secret"]);
    sessions.relinquish_to_owner(hash("secret"), other());
    let relinquished = relinquished_sessions.try_recv().unwrap();
    assert!(!format!("{sessions:?} {relinquished:?}").contains("secret"));
}

#[test]
fn a_deleted_session_is_remembered_until_it_is_removed() {
    let (sessions, _relinquished) = written_sessions(&["a"]);
    sessions.write_all_again();
    sessions.on_deleted("a");
    assert!(!sessions.is_local(hash("a")));
    assert_eq!(deletions(&sessions), [hash("a")]);
    assert!(sessions.is_deleted(hash("a")));
    sessions.on_deletion_result(hash("a"), true);
    assert_eq!(deletions(&sessions), []);
    assert!(!sessions.is_deleted(hash("a")));
    assert!(
        next(&sessions).is_none(),
        "the session must not be written after that"
    );
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_is_written_again_until_it_expires() {
    let (sessions, _relinquished) = written_sessions(&["a"]);
    let end = |id: &str| {
        sessions.on_deleted(id);
        assert_eq!(deletions(&sessions), [hash(id)]);
        sessions.on_deletion_result(hash(id), true);
    };
    end("a");
    for _ in 0..2 {
        assert!(!sessions.has_unconfirmed() && !sessions.is_deleted(hash("a")));
        sessions.write_all_again();
        assert!(sessions.has_unconfirmed() && sessions.is_deleted(hash("a")));
        assert_eq!(deletions(&sessions), [hash("a")]);
        sessions.on_deletion_result(hash("a"), true);
    }
    tokio::time::advance(crate::directory::RECORD_TTL).await;
    end("b");
    sessions.write_all_again();
    assert_eq!(deletions(&sessions), [hash("b")]);
}

/// The client has deleted the session twice, but the directory accepts only one of the two.
#[test]
fn a_session_that_was_deleted_twice_needs_no_further_write() {
    for is_first_accepted in [true, false] {
        let (sessions, _relinquished) = written_sessions(&["a"]);
        sessions.on_deleted("a");
        sessions.on_deleted("a");
        let Some(Work::Delete(batch)) = sessions.next_deletions() else {
            panic!("no deletions");
        };
        assert_eq!(batch.len(), 2);
        sessions.on_deletion_result(hash("a"), is_first_accepted);
        sessions.on_deletion_result(hash("a"), !is_first_accepted);
        assert!(!sessions.is_deleted(hash("a")));
        assert!(sessions.next_deletions().is_none());
    }
}

#[test]
fn deleted_sessions_are_bounded() {
    let (sessions, _relinquished) = Sessions::new(me());
    for id in 0..MAX_DELETED + 10 {
        sessions.on_deleted(&id.to_string());
    }
    assert_eq!(sessions.queues().deleted.len(), MAX_DELETED);
    assert_eq!(deletions(&sessions)[0], hash("10"));
}

#[tokio::test(start_paused = true)]
async fn a_session_is_written_again_after_a_minute_and_not_before() {
    let (sessions, _relinquished) = written_sessions(&["a"]);
    sleep(REFRESH_INTERVAL - Duration::from_millis(1)).await;
    sessions.refresh();
    assert_eq!(write_next(&sessions), []);
    sleep(Duration::from_millis(1)).await;
    sessions.refresh();
    assert_eq!(write_next(&sessions), [hash("a")]);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_loaded_and_never_opened_is_removed() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.on_loaded("a", Epoch::now(), params());
    sessions.on_loaded("b", Epoch::now(), params());
    sessions.on_opened("b", false);
    assert_eq!(
        write_next(&sessions),
        [hash("b")],
        "a restored session is written"
    );
    sleep(RESTORE_TIMEOUT).await;
    sessions.refresh();
    assert!(!sessions.is_local(hash("a")) && sessions.is_local(hash("b")));
}

/// Closing the old session takes longer than the instance waits, and only completes while the session is being restored.
#[test]
fn a_loaded_session_survives_the_end_of_its_previous_close() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.on_loaded("a", Epoch::now(), params());
    sessions.on_closed("a");
    sessions.on_opened("a", true);
    assert_eq!(write_next(&sessions), [hash("a")]);
}

#[test]
fn a_session_is_unclosed_from_its_contest_until_it_is_closed() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["a"]);
    let ownership = Ownership::begin(other());
    assert!(!sessions.has_unclosed());
    sessions.on_found(hash("a"), Record::Owned(ownership));
    assert!(sessions.has_unclosed());
    sessions.relinquish_contested(hash("a"), ownership);
    assert!(sessions.has_unclosed() && !sessions.has_contested());
    let relinquished = relinquished_sessions.try_recv().unwrap();
    sessions.relinquished.on_closed(&relinquished);
    assert!(!sessions.has_unclosed());
}

#[tokio::test(start_paused = true)]
async fn a_task_that_waits_for_the_write_of_a_session_is_woken() {
    let (sessions, _relinquished) = Sessions::new(me());
    sessions.begin("a", params());
    let second = Duration::from_secs(1);
    let times_out = async || {
        timeout(second, sessions.wait_until_written(hash("a")))
            .await
            .is_err()
    };
    assert!(times_out().await);
    let batch = next(&sessions).unwrap();
    let (has_timed_out, ()) = tokio::join!(times_out(), async { sessions.on_written(batch, &[]) });
    assert!(!has_timed_out);
    sessions.on_closed("a");
    assert!(!times_out().await, "no task waits for a closed session");
}

#[test]
fn a_session_is_given_to_its_client_once_written_or_if_it_needs_no_record() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["written"]);
    sessions.on_opened("without parameters", false);
    for id in ["written", "without parameters", "unknown"] {
        assert!(sessions.admit_new_session(id), "{id}");
    }
    assert!(relinquished_sessions.try_recv().is_err());

    sessions.on_opened("unwritten", false);
    sessions.begin("unwritten", params());
    assert!(!sessions.admit_new_session("unwritten"));
    let relinquished = relinquished_sessions.try_recv().unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("unwritten", RelinquishedTo::NoClient)
    );
    assert!(!sessions.is_local(hash("unwritten")));
    assert!(next(&sessions).is_none(), "the directory never had it");
}

#[test]
fn a_session_that_is_refused_during_its_write_is_removed_from_the_directory() {
    for is_written in [true, false] {
        let (sessions, _relinquished) = Sessions::new(me());
        sessions.on_opened("a", false);
        sessions.begin("a", params());
        let batch = next(&sessions).unwrap();
        assert!(!sessions.admit_new_session("a"));
        if is_written {
            sessions.on_written(batch, &[])
        } else {
            sessions.requeue(batch)
        }
        assert!(!sessions.is_local(hash("a")));
        assert_eq!(deletions(&sessions), [hash("a")]);
        sessions.on_deletion_result(hash("a"), true);
        assert!(next(&sessions).is_none());
    }
}

#[test]
fn a_session_is_relinquished_only_if_its_gate_is_closed() {
    let (sessions, mut relinquished_sessions) = written_sessions(&["a"]);
    sessions.relinquish(hash("a"));
    assert!(relinquished_sessions.try_recv().is_err() && sessions.has_open_gate("a"));
    sessions.gate("a").unwrap().close();
    assert!(!sessions.has_open_gate("a") && sessions.enter("a").is_none());
    sessions.relinquish(hash("a"));
    sessions.relinquish(hash("a"));
    let relinquished = relinquished_sessions.try_recv().unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("a", RelinquishedTo::AnyClaimer)
    );
    assert!(relinquished_sessions.try_recv().is_err());

    // The session is opened again.
    sessions.on_opened("a", false);
    sessions.relinquish(hash("a"));
    assert!(relinquished_sessions.try_recv().is_err() && sessions.enter("a").is_some());
}
