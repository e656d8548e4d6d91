//! What follows from a lease that may have lapsed.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Returns a health, and the moment `time` after a heartbeat that found nothing changed.
fn after(time: Duration) -> (DirectoryHealth, Instant) {
    let (mut health, started) = (DirectoryHealth::new(false), Instant::now());
    health.on_heartbeat_started(started);
    health.on_lease_missing();
    health.on_heartbeat_answered(started, BackendRunId::new("run"));
    health.on_all_written(started);
    assert_eq!((health.lapse(started), health.renewal_due()), (None, None));
    (health, started + time)
}

/// Sends a heartbeat at `now`, which is answered.
fn answer_heartbeat(health: &mut DirectoryHealth, now: Instant, run: &str, was_alive: bool) {
    health.on_heartbeat_started(now);
    if !was_alive {
        health.on_lease_missing();
    }
    health.on_heartbeat_answered(now, BackendRunId::new(run));
    health.on_all_written(now);
}

#[test]
fn a_suspension_shorter_than_the_lease_is_not_a_lapse() {
    let (mut health, now) = after(LEASE_TTL - SECOND / 2);
    assert_eq!(health.lapse(now), Some(Lapse::by_stall(now)));
    answer_heartbeat(&mut health, now, "run", true);
    assert_eq!((health.lapse(now), health.renewal_due()), (None, None));
}

#[test]
fn after_a_suspension_sessions_are_verified_until_they_have_taken_new_epochs() {
    for run in ["run", "another run"] {
        let (mut health, stopped) = after(2 * LEASE_TTL);
        answer_heartbeat(&mut health, stopped, run, false);
        for later in 1..4 {
            let now = stopped + later * SECOND;
            assert_eq!(health.lapse(now), Some(Lapse::by_stall(stopped)));
            assert_eq!(health.renewal_due(), Some(&BackendRunId::new("run")));
            answer_heartbeat(&mut health, now, run, true);
        }
        health.on_epochs_renewed();
        health.on_all_written(stopped + 4 * SECOND);
        assert_eq!(health.lapse(stopped + 4 * SECOND), None);
    }
}

/// The directory is slow and there are many sessions.
#[test]
fn after_a_suspension_sessions_are_verified_until_the_last_one_has_taken_its_epoch() {
    let (mut health, stopped) = after(2 * LEASE_TTL);
    health.on_heartbeat_started(stopped);
    health.on_lease_missing();
    health.on_heartbeat_answered(stopped, BackendRunId::new("run"));
    health.on_epochs_renewed();
    for later in 1..4 {
        let now = stopped + later * SECOND;
        health.on_heartbeat_started(now);
        if later == 2 {
            health.on_heartbeat_failed();
            continue;
        }
        health.on_heartbeat_answered(now, BackendRunId::new("run"));
        assert_eq!(health.lapse(now), Some(Lapse::by_stall(stopped)));
    }
    health.on_all_written(stopped + 4 * SECOND);
    assert_eq!(health.lapse(stopped + 4 * SECOND), None);
}

/// A snapshot may include the lease.
#[test]
fn after_a_suspension_a_lease_in_another_run_proves_nothing() {
    let (mut health, stopped) = after(2 * LEASE_TTL);
    answer_heartbeat(&mut health, stopped, "another run", true);
    assert_eq!(health.lapse(stopped), Some(Lapse::by_stall(stopped)));
    assert_eq!(health.renewal_due(), Some(&BackendRunId::new("run")));
}

/// Availability takes precedence in this case.
#[test]
fn after_heartbeats_that_failed_sessions_are_verified_until_they_are_written() {
    let (mut health, mut now) = after(SECOND);
    for _ in 0..10 {
        health.on_heartbeat_started(now);
        health.on_heartbeat_failed();
        assert_eq!(health.lapse(now), None);
        now += SECOND;
    }
    health.on_heartbeat_started(now);
    health.on_lease_missing();
    health.on_heartbeat_answered(now, BackendRunId::new("another run"));
    assert_eq!(health.lapse(now), Some(Lapse::by_failures(now)));
    health.on_all_written(now);
    assert_eq!(health.lapse(now), None);
    assert!(health.renewal_due().is_some(), "new epochs stay due");
}
