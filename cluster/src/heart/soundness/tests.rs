//! What follows from a lease that may have been over.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// A soundness, some time after a heartbeat in a run of the engine that found everything as it was left.
fn after(time: Duration) -> (Soundness, Instant) {
    let (mut soundness, begun) = (Soundness::new(false), Instant::now());
    soundness.begins(begun);
    soundness.has_no_lease();
    soundness.answered(begun, EngineRun::new("run"));
    soundness.wrote_all(begun);
    assert_eq!((soundness.lapse(begun), soundness.owed()), (None, None));
    (soundness, begun + time)
}

/// A heartbeat that begins then, and is answered.
fn beats(soundness: &mut Soundness, now: Instant, run: &str, was_alive: bool) {
    soundness.begins(now);
    if !was_alive {
        soundness.has_no_lease();
    }
    soundness.answered(now, EngineRun::new(run));
    soundness.wrote_all(now);
}

#[test]
fn a_stop_that_the_lease_outlived_is_none() {
    let (mut soundness, now) = after(LEASE - SECOND / 2);
    assert_eq!(soundness.lapse(now), Some(Lapse::by_stop(now)));
    beats(&mut soundness, now, "run", true);
    assert_eq!((soundness.lapse(now), soundness.owed()), (None, None));
}

#[test]
fn after_a_stop_sessions_are_verified_until_they_have_taken_new_epochs() {
    for run in ["run", "another run"] {
        let (mut soundness, stopped) = after(2 * LEASE);
        beats(&mut soundness, stopped, run, false);
        for later in 1..4 {
            let now = stopped + later * SECOND;
            assert_eq!(soundness.lapse(now), Some(Lapse::by_stop(stopped)));
            assert_eq!(soundness.owed(), Some(&EngineRun::new("run")));
            beats(&mut soundness, now, run, true);
        }
        soundness.takes_epochs();
        soundness.wrote_all(stopped + 4 * SECOND);
        assert_eq!(soundness.lapse(stopped + 4 * SECOND), None);
    }
}

/// The directory is slow, and there are many.
#[test]
fn after_a_stop_sessions_are_verified_until_the_last_of_them_has_taken_its_epoch() {
    let (mut soundness, stopped) = after(2 * LEASE);
    soundness.begins(stopped);
    soundness.has_no_lease();
    soundness.answered(stopped, EngineRun::new("run"));
    soundness.takes_epochs();
    for later in 1..4 {
        let now = stopped + later * SECOND;
        soundness.begins(now);
        if later == 2 {
            soundness.failed();
            continue;
        }
        soundness.answered(now, EngineRun::new("run"));
        assert_eq!(soundness.lapse(now), Some(Lapse::by_stop(stopped)));
    }
    soundness.wrote_all(stopped + 4 * SECOND);
    assert_eq!(soundness.lapse(stopped + 4 * SECOND), None);
}

/// A snapshot may have the lease.
#[test]
fn after_a_stop_a_lease_in_another_run_proves_nothing() {
    let (mut soundness, stopped) = after(2 * LEASE);
    beats(&mut soundness, stopped, "another run", true);
    assert_eq!(soundness.lapse(stopped), Some(Lapse::by_stop(stopped)));
    assert_eq!(soundness.owed(), Some(&EngineRun::new("run")));
}

/// There availability has precedence.
#[test]
fn after_heartbeats_that_failed_sessions_are_verified_until_they_are_written() {
    let (mut soundness, mut now) = after(SECOND);
    for _ in 0..10 {
        soundness.begins(now);
        soundness.failed();
        assert_eq!(soundness.lapse(now), None);
        now += SECOND;
    }
    soundness.begins(now);
    soundness.has_no_lease();
    soundness.answered(now, EngineRun::new("another run"));
    assert_eq!(soundness.lapse(now), Some(Lapse::by_failures(now)));
    soundness.wrote_all(now);
    assert_eq!(soundness.lapse(now), None);
    assert!(soundness.owed().is_some(), "in their time");
}
