//! A Redis that loses its data, or has older data than the instances (rule 1).

use std::fs;

use super::*;

async fn owner_there(directory: &Limited, of: &str) -> Option<Owner> {
    let there = ownership(directory, session(of).session).await;
    there.map(|there| there.owner)
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn records_of_a_living_owner_in_an_old_snapshot_are_overwritten() {
    let mut server = Server::start_with(&["--save", "3600", "1000000"]).await;
    let former = instance(9);
    let directory = directory(&server);
    // Ten sessions have another owner, whose lease is in the snapshot too.
    directory
        .acquire_lease(former, &Status::default())
        .await
        .unwrap();
    let former_ones: Vec<_> = (0..10).map(|id| session(&id.to_string())).collect();
    directory.register(former, &former_ones).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    let () = server.ask("SAVE").await;
    let snapshot = server.folder().join("dump.rdb");
    let old = fs::read(&snapshot).unwrap();

    // Then the living instance has these ten, and forty that the snapshot does not have. It claims five of the ten once more.
    let one = Living::begin(directory.clone(), 1, 50);
    one.until_consistent().await;
    for id in 0..5_u8 {
        let claimed = session(&id.to_string()).session;
        let is = ownership(&directory, claimed).await.unwrap();
        let wanted = is.claimed_by(one.me);
        let claim = directory.claim(claimed, is, wanted).await.unwrap();
        assert_eq!(claim, Claim::Won);
        one.sessions.on_claimed(claimed, wanted.epoch);
    }
    let two = Living::start(&server, 2, 0).await;
    for id in 0..50 {
        let owner = owner_there(&directory, &id.to_string()).await;
        assert_eq!(owner, Some(one.me), "{id}");
    }

    server.kill().await;
    fs::write(&snapshot, old).unwrap();
    server.start_again().await;
    let begun = Instant::now();
    eventually("the living owner has all of its sessions", async || {
        for id in 0..50 {
            let there = directory.look(session(&id.to_string()).session).await;
            let is_its = there.is_ok_and(
                |look| matches!(look.record, Some(Record::Owned(is)) if is.owner == one.me),
            );
            if !is_its {
                return false;
            }
        }
        true
    })
    .await;
    assert!(begun.elapsed() < 5 * SECOND, "after {:?}", begun.elapsed());
    // Longer than the lease in the snapshot.
    sleep(LEASE_TTL + SECOND).await;
    for id in 0..50 {
        let id = id.to_string();
        assert!(one.sessions.is_local(session(&id).session), "{id} is lost");
        assert_eq!(owner_there(&two.directory, &id).await, Some(one.me), "{id}");
    }
    one.until_consistent().await;
    assert!(!one.sessions.has_contested());
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn flushed_records_are_written_again_and_no_session_is_lost() {
    let server = Server::start().await;
    let one = Living::start(&server, 1, 1_000).await;
    let two = Living::start(&server, 2, 0).await;
    for _ in 0..3 {
        let before = one.heartbeat.consistent_since();
        let () = server.ask("FLUSHALL").await;
        let begun = Instant::now();
        eventually("it is consistent again", async || {
            let since = one.heartbeat.consistent_since();
            if let Ok(look) = two.directory.look(session("7").session).await {
                assert!(look.record.is_some() || !two.heartbeat.proves(&look.leases));
            }
            since.is_some() && since != before
        })
        .await;
        assert!(begun.elapsed() < 5 * SECOND, "after {:?}", begun.elapsed());
        two.until_consistent().await;
        let known: usize = server.ask("DBSIZE").await;
        assert_eq!(known, 1_001);
    }
    for id in 0..1_000 {
        assert!(one.sessions.is_local(session(&id.to_string()).session));
    }
    assert_eq!(owner_there(&two.directory, "999").await, Some(one.me));
}
