//! Tests against a Redis that each of them starts. `cluster/tests/redis/run` runs them.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::{super::*, directory_at, server::Server};
use crate::{
    answers::Answers,
    directory::{
        ANSWER_TTL, Limited,
        contract::{self, claim_from, instance, is_alive, ownership, session},
    },
    ids::Epoch,
    membership::{
        heartbeat::{HEARTBEAT_INTERVAL, Heartbeat, SETTLE_PERIOD},
        turned_away::TurnedAway,
    },
    routing::owner_cache::OwnerCache,
    sessions::Sessions,
};

mod restored;
mod setups;

const SECOND: Duration = Duration::from_secs(1);

/// Timeout of each wait, which is long because the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(20);

fn directory(server: &Server) -> Limited {
    Limited::new(directory_at(&server.url()).unwrap())
}

async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TIMEOUT, "never: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// An instance that sends heartbeats and has sessions.
struct LiveInstance {
    me: Owner,
    directory: Limited,
    heartbeat: Arc<Heartbeat>,
    sessions: Arc<Sessions>,
    task: tokio::task::JoinHandle<()>,
}

impl LiveInstance {
    async fn start(server: &Server, number: u8, session_count: usize) -> Self {
        let live = Self::begin(directory(server), number, session_count);
        live.until_consistent().await;
        live
    }

    /// Starts an instance without waiting for its directory.
    fn begin(directory: Limited, number: u8, session_count: usize) -> Self {
        let me = instance(number);
        let (sessions, _relinquished) = Sessions::new(me.incarnation);
        let heartbeat = Heartbeat::new(
            me,
            directory.clone(),
            sessions.clone(),
            Arc::new(TurnedAway::new(Duration::ZERO)),
            Answers::new(directory.clone()),
            false,
        );
        for id in 0..session_count {
            let id = id.to_string();
            sessions.begin(&id, session(&id).params);
        }
        let task = tokio::spawn(heartbeat.clone().run());
        Self {
            me,
            directory,
            heartbeat,
            sessions,
            task,
        }
    }

    async fn until_consistent(&self) {
        eventually("the directory is consistent", async || {
            self.heartbeat.consistent_since().is_some()
        })
        .await;
    }

    async fn until_not_consistent(&self) {
        eventually("the directory is not consistent", async || {
            self.heartbeat.consistent_since().is_none()
        })
        .await;
    }
}

impl Drop for LiveInstance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_redis_directory_fulfils_the_contract() {
    let server = Server::start().await;
    contract::holds(directory_at(&server.url()).unwrap()).await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn keys_expire_in_time_and_contain_no_session_id() {
    let server = Server::start().await;
    let directory = directory(&server);
    let (me, secret) = (instance(1), SessionHash::of("secret"));
    let status = Status::default();
    directory.acquire_lease(me, &status).await.unwrap();
    let registration = Registration {
        params: Arc::from(*b"{}"),
        ..session("secret")
    };
    directory.register(me, &[registration]).await.unwrap();
    directory
        .keep_answer(
            secret,
            me.incarnation,
            CallNumber::new(7),
            Bytes::from_static(b"{}"),
            ANSWER_TTL,
        )
        .await
        .unwrap();
    let mut keys: Vec<String> = server.query("KEYS *").await;
    keys.sort();
    let expected = [
        answer_key(secret, me.incarnation, CallNumber::new(7)),
        LEASES.to_owned(),
        session_key(secret),
    ];
    assert_eq!(keys, expected);
    let owner: Vec<String> = server
        .query(&format!("HGETALL {}", session_key(secret)))
        .await;
    let stored = ownership(&directory, secret).await.unwrap();
    assert_eq!(owner, ["o", &stored.to_string(), "p", "{}"]);
    assert_eq!(stored.owner, me);
    assert!(!format!("{keys:?}{owner:?}").contains("secret"));
    for (key, ttl) in keys.iter().zip([ANSWER_TTL, LEASES_TTL, RECORD_TTL]) {
        let remaining: u64 = server.query(&format!("PTTL {key}")).await;
        assert!(
            (millis(ttl) - 5_000..=millis(ttl)).contains(&remaining),
            "{key} expires in {remaining} ms"
        );
    }
    // A claim renews the record's expiry.
    let () = server
        .query(&format!("PEXPIRE {} 1000000", session_key(secret)))
        .await;
    claim_from(&directory, secret, me, instance(2)).await;
    let remaining: u64 = server.query(&format!("PTTL {}", session_key(secret))).await;
    assert!(remaining > 3_000_000);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_redis_restarted_empty_is_not_consistent_and_denies_no_session_until_all_are_written() {
    let mut server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 1_000).await;
    let other = LiveInstance::start(&server, 2, 0).await;
    let (existing, unknown) = (session("7").session, SessionHash::of("unknown"));
    let is_denied = async |session| match other.directory.look_up(session).await {
        Ok(snapshot) => {
            snapshot.record.is_none() && other.heartbeat.proves_absence(&snapshot.leases)
        }
        Err(_) => false,
    };
    eventually("an unknown session is denied", async || {
        is_denied(unknown).await
    })
    .await;
    server.kill().await;
    server.start_again().await;
    let started = Instant::now();
    let mut is_consistent_too_early = false;
    let before = live.heartbeat.consistent_since();
    while started.elapsed() < SETTLE_PERIOD + 3 * SECOND {
        assert!(!is_denied(existing).await);
        let is_consistent_again = live
            .heartbeat
            .consistent_since()
            .is_some_and(|since| Some(since) != before);
        let known: usize = server.query("DBSIZE").await;
        // The sessions have 1,000 keys, but all leases share one. `is_consistent_again` was read before `known`.
        is_consistent_too_early |= is_consistent_again && known < 1_001;
        sleep(Duration::from_millis(5)).await;
    }
    assert!(!is_consistent_too_early);
    let stored = ownership(&other.directory, existing).await.unwrap();
    assert_eq!(stored.owner, live.me);
    eventually("an unknown session is denied again", async || {
        is_denied(unknown).await
    })
    .await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_redis_that_was_down_is_used_again_soon() {
    let mut server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 10).await;
    server.kill().await;
    live.until_not_consistent().await;
    // Long enough that a client which waits longer after each attempt would have reached a long delay.
    sleep(8 * SECOND).await;
    server.start_again().await;
    let started = Instant::now();
    live.until_consistent().await;
    assert!(
        started.elapsed() < 3 * SECOND,
        "after {:?}",
        started.elapsed()
    );
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn no_caller_waits_long_for_a_redis_that_is_stopped() {
    let server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 10).await;
    let owners = OwnerCache::new(live.me.incarnation, live.directory.clone());
    server.stop();
    let started = Instant::now();
    let (me, any) = (instance(3), session("any"));
    let previous = Ownership::begin(me);
    let results = tokio::join!(
        owners.find(any.session),
        live.directory.load(any.session),
        live.directory
            .claim(any.session, previous, previous.claimed_by(live.me)),
        live.directory.register(me, std::slice::from_ref(&any)),
        live.directory.leases(),
    );
    assert!(
        results.0.is_err()
            && results.1.is_err()
            && results.2.is_err()
            && results.3.is_err()
            && results.4.is_err()
    );
    assert!(
        started.elapsed() < 3 * SECOND,
        "after {:?}",
        started.elapsed()
    );
    live.until_not_consistent().await;
    // Long enough for the lease to lapse.
    sleep(LEASE_TTL).await;
    server.resume();
    let started = Instant::now();
    live.until_consistent().await;
    assert!(
        started.elapsed() < 3 * SECOND,
        "after {:?}",
        started.elapsed()
    );
    assert!(live.sessions.is_local(session("7").session));
    assert!(is_alive(&live.directory, live.me).await);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn the_scripts_are_loaded_again_after_a_redis_has_lost_them() {
    let server = Server::start().await;
    let directory = directory(&server);
    let (former, owner) = (instance(1), instance(2));
    for _ in 0..2 {
        directory.register(former, &[session("a")]).await.unwrap();
        let () = server.query("SCRIPT FLUSH").await;
        let claim = claim_from(&directory, session("a").session, former, owner).await;
        assert_eq!(claim, Claim::Won);
        let () = server.query("SCRIPT FLUSH").await;
        let tombstone = Tombstone {
            by: owner.incarnation,
            epoch: Epoch::now(),
        };
        directory
            .delete(session("b").session, tombstone)
            .await
            .unwrap();
        let () = server.query("SCRIPT FLUSH").await;
        directory
            .acquire_lease(former, &Status::default())
            .await
            .unwrap();
        let () = server.query("SCRIPT FLUSH").await;
        directory
            .heartbeat(former, &Status::default())
            .await
            .unwrap();
        let () = server.query("FLUSHALL").await;
    }
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_malformed_record_is_an_error_and_does_not_delay_other_sessions() {
    let server = Server::start().await;
    let directory = directory(&server);
    let me = instance(1);
    let (text, list, good) = (session("text"), session("list"), session("good"));
    let () = server
        .query(&format!("HSET {} o 10.0.0.7", session_key(text.session)))
        .await;
    let _: usize = server
        .query(&format!("LPUSH {} x", session_key(list.session)))
        .await;
    let error = directory.look_up(text.session).await.unwrap_err();
    let expected = format!(
        "the directory contains a value not written by any instance: mcp:s:{} is not a session record",
        text.session
    );
    assert_eq!(error.to_string(), expected);
    directory.load(text.session).await.unwrap_err();
    let previous = Ownership::begin(me);
    let claim = directory.claim(text.session, previous, previous.claimed_by(me));
    claim.await.unwrap_err();
    directory.look_up(list.session).await.unwrap_err();
    let tombstone = Tombstone {
        by: me.incarnation,
        epoch: Epoch::now(),
    };
    directory.delete(text.session, tombstone).await.unwrap();
    directory.delete(list.session, tombstone).await.unwrap();
    assert_eq!(
        directory
            .register(me, &[text, list, good.clone()])
            .await
            .unwrap(),
        []
    );
    let stored = ownership(&directory, good.session).await.unwrap();
    assert_eq!(stored.owner, me);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_connection_to_a_redis_that_became_a_replica_is_replaced() {
    let server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 1).await;
    let connections = async || -> u64 {
        let info: String = server.query("INFO stats").await;
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().trim().parse().unwrap()
    };
    let () = server.query("REPLICAOF 127.0.0.1 1").await;
    live.until_not_consistent().await;
    let before = connections().await;
    sleep(2 * SECOND).await;
    // One of the new connections belongs to `INFO` itself.
    assert!(connections().await > before + 1);
    let () = server.query("REPLICAOF NO ONE").await;
    live.until_consistent().await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn answers_that_a_redis_refuses_do_not_affect_the_heartbeat() {
    let server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 1).await;
    let (session, generation, directory) =
        (session("a").session, live.me.incarnation, &live.directory);
    let keep = async |call, answer: Bytes| {
        let call = CallNumber::new(call);
        let write = directory.keep_answer(session, generation, call, answer, ANSWER_TTL);
        write.await
    };
    let large = Bytes::from(vec![b'x'; 1024 * 1024]);
    keep(0, large.clone()).await.unwrap();
    let since = live.heartbeat.consistent_since();
    // Answers have a connection of their own, which is closed here.
    let clients: String = server.query("CLIENT LIST").await;
    assert_eq!(
        clients.lines().count(),
        3,
        "one connection belongs to CLIENT LIST:\n{clients}"
    );
    let answers = clients.lines().find(|client| client.contains("cmd=set "));
    let id = answers.and_then(|client| client.split(' ').next()).unwrap();
    let id = id.strip_prefix("id=").unwrap();
    let killed: u64 = server.query(&format!("CLIENT KILL ID {id}")).await;
    assert_eq!(killed, 1);
    eventually("an answer is kept again", async || {
        keep(1, large.clone()).await.is_ok()
    })
    .await;

    // The backend's memory is full. Removing an answer frees some.
    let () = server.query("CONFIG SET maxmemory 1mb").await;
    let error = keep(2, large.clone()).await.unwrap_err();
    assert!(error.to_string().contains("OOM"), "{error}");
    for call in [0, 1] {
        let call = CallNumber::new(call);
        directory
            .remove_answer(session, generation, call)
            .await
            .unwrap();
    }
    let () = server.query("CONFIG SET maxmemory 0").await;
    keep(2, large).await.unwrap();
    assert_eq!(live.heartbeat.consistent_since(), since);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn ten_thousand_sessions_are_written_while_the_lease_is_renewed() {
    let mut server = Server::start().await;
    let live = LiveInstance::start(&server, 1, 10_000).await;
    let before = live.heartbeat.consistent_since();
    server.kill().await;
    server.start_again().await;
    let started = Instant::now();
    eventually("everything has been written", async || {
        live.heartbeat
            .consistent_since()
            .is_some_and(|since| Some(since) != before)
    })
    .await;
    println!(
        "consistent {:?} after it restarted empty",
        started.elapsed()
    );
    let known: usize = server.query("DBSIZE").await;
    assert_eq!(known, 10_001);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn an_instance_that_shuts_down_releases_its_lease_at_once() {
    let server = Server::start().await;
    let mut live = LiveInstance::start(&server, 1, 1).await;
    live.heartbeat.stop();
    timeout(TIMEOUT, &mut live.task).await.unwrap().unwrap();
    let leases: usize = server.query("HLEN mcp:i").await;
    assert_eq!(leases, 0);
}

/// The backend's clock was ahead when a client was turned away, and was set back afterwards.
#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_report_of_a_turned_away_client_from_the_future_counts_from_now() {
    let server = Server::start().await;
    let now: Vec<u64> = server.query("TIME").await;
    let ahead = (now[0] + 3_600) * 1_000;
    let () = server
        .query(&format!("HSET mcp:i turned-away {ahead}"))
        .await;
    let live = LiveInstance::start(&server, 1, 1).await;
    sleep(3 * HEARTBEAT_INTERVAL).await;
    let leases = live.directory.leases().await.unwrap();
    assert!(leases.turned_away > Some(HEARTBEAT_INTERVAL), "{leases:?}");
}

/// Heartbeats and answers use different connections. The backend, or a router in between, closes connections that are idle.
#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn an_answer_is_read_and_written_over_a_connection_that_was_idle() {
    let server = Server::start().await;
    let () = server.query("CONFIG SET timeout 3").await;
    let live = LiveInstance::start(&server, 1, 1).await;
    let (generation, session) = (live.me.incarnation, session("0").session);
    let keep = async |number, answer| {
        let call = CallNumber::new(number);
        let write = live
            .directory
            .keep_answer(session, generation, call, answer, ANSWER_TTL);
        write.await.unwrap();
    };
    let until_closed = async || {
        eventually("the idle connection is closed", async || {
            let clients: String = server.query("CLIENT LIST").await;
            clients.lines().all(|client| !client.contains("cmd=set"))
        })
        .await;
    };
    keep(7, Bytes::from_static(b"{}")).await;
    until_closed().await;
    let read = live
        .directory
        .answer(session, generation, CallNumber::new(7))
        .await;
    assert_eq!(read.unwrap().as_deref(), Some(&b"{}"[..]));
    keep(8, Bytes::from_static(b"{}")).await;
    until_closed().await;
    keep(9, Bytes::from_static(b"{}")).await;
}
