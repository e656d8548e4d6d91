//! A Redis that has lost its data, or has older data than the instances.

use std::fs;

use super::*;

async fn stored_owner(directory: &Limited, id: &str) -> Option<Owner> {
    let stored = ownership(directory, session(id).session).await;
    stored.map(|ownership| ownership.owner)
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn records_of_a_living_owner_in_an_old_snapshot_are_overwritten() {
    let mut server = Server::start_with(&["--save", "3600", "1000000"]).await;
    let former = instance(9);
    let directory = directory(&server);
    // Ten sessions have another owner, whose lease is in the snapshot as well.
    directory
        .acquire_lease(former, &Status::default())
        .await
        .unwrap();
    let former_sessions: Vec<_> = (0..10).map(|id| session(&id.to_string())).collect();
    directory.register(former, &former_sessions).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    let () = server.query("SAVE").await;
    let snapshot = server.folder().join("dump.rdb");
    let old = fs::read(&snapshot).unwrap();

    // Then the live instance owns these ten, and forty more that the snapshot does not have. It claims five of the ten once more.
    let live = LiveInstance::begin(directory.clone(), 1, 50);
    live.until_consistent().await;
    for id in 0..5_u8 {
        let claimed = session(&id.to_string()).session;
        let stored = ownership(&directory, claimed).await.unwrap();
        let wanted = stored.claimed_by(live.me);
        let claim = directory.claim(claimed, stored, wanted).await.unwrap();
        assert_eq!(claim, Claim::Won);
        live.sessions.on_claimed(claimed, wanted.epoch);
    }
    let other = LiveInstance::start(&server, 2, 0).await;
    for id in 0..50 {
        let owner = stored_owner(&directory, &id.to_string()).await;
        assert_eq!(owner, Some(live.me), "{id}");
    }

    server.kill().await;
    fs::write(&snapshot, old).unwrap();
    server.start_again().await;
    let started = Instant::now();
    eventually("the living owner has all of its sessions", async || {
        for id in 0..50 {
            let snapshot = directory.look_up(session(&id.to_string()).session).await;
            let is_owned = snapshot.is_ok_and(
                |snapshot| matches!(snapshot.record, Some(Record::Owned(ownership)) if ownership.owner == live.me),
            );
            if !is_owned {
                return false;
            }
        }
        true
    })
    .await;
    assert!(
        started.elapsed() < 5 * SECOND,
        "after {:?}",
        started.elapsed()
    );
    // Longer than the lease in the snapshot lasts.
    sleep(LEASE_TTL + SECOND).await;
    for id in 0..50 {
        let id = id.to_string();
        assert!(
            live.sessions.is_local(session(&id).session),
            "session {id} is lost"
        );
        assert_eq!(
            stored_owner(&other.directory, &id).await,
            Some(live.me),
            "{id}"
        );
    }
    live.until_consistent().await;
    assert!(!live.sessions.has_contested());
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn flushed_records_are_written_again_and_no_session_is_lost() {
    let server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 1_000).await;
    let other = LiveInstance::start(&server, 2, 0).await;
    for _ in 0..3 {
        let before = live.heartbeat.consistent_since();
        let () = server.query("FLUSHALL").await;
        let started = Instant::now();
        eventually("the directory is consistent again", async || {
            let since = live.heartbeat.consistent_since();
            if let Ok(snapshot) = other.directory.look_up(session("7").session).await {
                assert!(
                    snapshot.record.is_some() || !other.heartbeat.proves_absence(&snapshot.leases)
                );
            }
            since.is_some() && since != before
        })
        .await;
        assert!(
            started.elapsed() < 5 * SECOND,
            "after {:?}",
            started.elapsed()
        );
        other.until_consistent().await;
        let known: usize = server.query("DBSIZE").await;
        assert_eq!(known, 1_001);
    }
    for id in 0..1_000 {
        assert!(live.sessions.is_local(session(&id.to_string()).session));
    }
    assert_eq!(stored_owner(&other.directory, "999").await, Some(live.me));
}
