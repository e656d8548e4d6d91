//! Setups: TLS, Sentinel, Redis Cluster, eviction, passwords.

use super::*;
use crate::{Cluster, tests::log_lines::Warnings};

const NAME: &str = "directory";

/// A primary, its replica, and a Sentinel that knows both.
struct Group {
    primary: Server,
    replica: Server,
    sentinel: Server,
}

// === impl Group ===

impl Group {
    async fn start() -> Self {
        let primary = Server::start().await;
        let port = primary.port().to_string();
        let replica = Server::start_with(&["--replicaof", "127.0.0.1", &port]).await;
        eventually("the replica is synchronized", async || {
            replica.info("replication", "master_link_status").await == "up"
        })
        .await;
        let sentinel = primary.start_sentinel(NAME).await;
        eventually("the Sentinel knows the replica", async || {
            sentinel
                .info("sentinel", "master0")
                .await
                .contains("slaves=1")
        })
        .await;
        Self {
            primary,
            replica,
            sentinel,
        }
    }

    fn directory(&self) -> Limited {
        let address = RedisAddress {
            sentinels: vec![self.sentinel.url()],
            ..RedisAddress::new(format!("redis://{NAME}"))
        };
        Limited::new(RedisDirectory::new(&address).unwrap())
    }

    async fn until_failed_over(&self) {
        eventually("the replica is the primary", async || {
            self.replica.info("replication", "role").await == "master"
        })
        .await;
    }

    /// Asserts that the replica becomes the primary and that the instance uses it within 6 s.
    async fn assert_used_by(&self, live: &LiveInstance, sessions: usize) {
        self.until_failed_over().await;
        let failed_over = Instant::now();
        let id = self.replica.info("server", "run_id").await;
        eventually("the instance uses the new primary", async || {
            let leases = live.directory.leases().await;
            live.heartbeat.consistent_since().is_some()
                && leases.is_ok_and(|leases| leases.run == BackendRunId::new(&id))
        })
        .await;
        let elapsed = failed_over.elapsed();
        assert!(elapsed < 6 * SECOND, "after {elapsed:?}");
        let known: usize = self.replica.query("DBSIZE").await;
        assert_eq!(known, sessions + 1);
        assert!(is_alive(&live.directory, live.me).await);
        assert!(live.sessions.is_local(session("7").session));
        let (session, call) = (session("7").session, CallNumber::new(7));
        let write = live.directory.keep_answer(
            session,
            live.me.incarnation,
            call,
            Bytes::from_static(b"{}"),
            ANSWER_TTL,
        );
        write.await.unwrap();
    }
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn after_a_failover_the_new_primary_is_used_within_seconds() {
    let mut group = Group::start().await;
    let live = LiveInstance::begin(group.directory(), 1, 100);
    live.until_consistent().await;
    group.primary.kill().await;
    group.assert_used_by(&live, 100).await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_primary_that_is_stopped_is_abandoned_and_not_used_when_it_continues() {
    let group = Group::start().await;
    let live = LiveInstance::begin(group.directory(), 1, 100);
    live.until_consistent().await;
    group.primary.stop();
    group.assert_used_by(&live, 100).await;
    group.primary.resume();
    eventually("the old primary is a replica", async || {
        group.primary.info("replication", "role").await == "slave"
    })
    .await;
    live.until_consistent().await;
    let id = group.replica.info("server", "run_id").await;
    let leases = live.directory.leases().await.unwrap();
    assert_eq!(leases.run, BackendRunId::new(&id));
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_previous_primary_that_still_answers_is_abandoned() {
    let group = Group::start().await;
    let live = LiveInstance::begin(group.directory(), 1, 100);
    live.until_consistent().await;
    // Sentinel refuses until it has noticed that the replica is synchronized, which it checks every 10 s.
    let failover = format!("SENTINEL FAILOVER {NAME}");
    eventually("the Sentinel starts", async || {
        let started: redis::RedisResult<()> = group.sentinel.try_query(&failover).await;
        started.is_ok()
    })
    .await;
    group.assert_used_by(&live, 100).await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn an_instance_joins_without_its_sentinels_and_is_consistent_once_they_run() {
    let mut group = Group::start().await;
    group.sentinel.kill().await;
    let live = LiveInstance::begin(group.directory(), 1, 10);
    sleep(2 * SECOND).await;
    assert!(live.heartbeat.consistent_since().is_none());
    group.sentinel.start_again().await;
    live.until_consistent().await;
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_redis_cluster_is_refused_at_connect_and_never_consistent_if_it_appears_later() {
    let cluster_port = 10_000 + std::process::id() % 20_000;
    let options = [
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &cluster_port.to_string(),
    ];
    let mut server = Server::start_with(&options).await;
    let connect = || {
        Cluster::redis(server.url())
            .advertise("10.0.0.7:9000")
            .connect()
    };
    let error = connect().await.unwrap_err().to_string();
    assert!(error.contains("Redis Cluster"), "{error}");
    server.kill().await;
    let warnings = Warnings::watch();
    let live = LiveInstance::begin(directory(&server), 1, 10);
    let connect = || {
        Cluster::redis(server.url())
            .advertise("10.0.0.7:9000")
            .connect()
    };
    assert!(connect().await.is_ok(), "the directory is unreachable");
    server.start_again().await;
    eventually("the error is logged", async || {
        warnings.count("Redis Cluster") > 0
    })
    .await;
    sleep(3 * SECOND).await;
    assert!(live.heartbeat.consistent_since().is_none());
    let errors = warnings.count("ERROR");
    assert!(
        (1..=2).contains(&errors),
        "at most one for each of the two members, not for each heartbeat: {errors}"
    );
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_redis_that_evicts_is_logged_once() {
    let warning = "maxmemory-policy allkeys-lru";
    let options = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let mut server = Server::start_with(&options).await;
    let warnings = Warnings::watch();
    let member = Cluster::redis(server.url()).advertise("10.0.0.7:9000");
    let _member = member.connect().await.unwrap();
    assert_eq!(warnings.count(warning), 1);
    sleep(5 * SECOND).await;
    assert_eq!(warnings.count(warning), 1);
    assert_eq!(warnings.count("404"), 1);
    // Once per run of the backend.
    server.kill().await;
    server.start_again().await;
    eventually("the warning is logged again", async || {
        warnings.count(warning) == 2
    })
    .await;
    sleep(5 * SECOND).await;
    assert_eq!(warnings.count(warning), 2);

    // Without a limit, or with the recommended policy, there is nothing to warn about.
    for policy in ["allkeys-lru", "noeviction"] {
        let limit = if policy == "noeviction" { "100mb" } else { "0" };
        let options = ["--maxmemory", limit, "--maxmemory-policy", policy];
        let server = Server::start_with(&options).await;
        let member = Cluster::redis(server.url()).advertise("10.0.0.7:9000");
        let _member = member.connect().await.unwrap();
        sleep(SECOND).await;
    }
    assert_eq!(warnings.count("maxmemory-policy"), 2);
}

#[tokio::test]
#[ignore = "needs redis-server: cluster/tests/redis/run"]
async fn a_password_that_is_wrong_for_a_while_is_tried_again() {
    let server = Server::start_with(&["--requirepass", "secret"]).await;
    let url = format!("redis://:secret@127.0.0.1:{}", server.port());
    let live = LiveInstance::begin(Limited::new(directory_at(&url).unwrap()), 1, 10);
    live.until_consistent().await;
    let mut operator = redis::Client::open(url)
        .unwrap()
        .get_multiplexed_async_connection()
        .await
        .unwrap();
    let mut execute = async |command: &str| {
        let mut words = command.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        for word in words {
            command.arg(word);
        }
        let _answer: redis::Value = command.query_async(&mut operator).await.unwrap();
    };
    execute("CONFIG SET requirepass another").await;
    execute("CLIENT KILL TYPE normal SKIPME yes").await;
    live.until_not_consistent().await;
    // Longer than a connection keeps retrying.
    sleep(5 * SECOND).await;
    execute("CONFIG SET requirepass secret").await;
    let started = Instant::now();
    live.until_consistent().await;
    assert!(
        started.elapsed() < 5 * SECOND,
        "after {:?}",
        started.elapsed()
    );
}

#[cfg(feature = "tls")]
mod tls {
    use std::fs;

    use super::{super::super::server::certify, *};

    fn address(server: &Server, root: &std::path::Path) -> RedisAddress {
        RedisAddress {
            root_certificate: Some(fs::read(root.join("ca.pem")).unwrap()),
            ..RedisAddress::new(format!("rediss://127.0.0.1:{}", server.port()))
        }
    }

    #[tokio::test]
    #[ignore = "needs redis-server: cluster/tests/redis/run"]
    async fn a_directory_with_tls_and_its_own_authority_fulfils_the_contract() {
        let server = Server::start_with_tls().await;
        let address = address(&server, server.folder());
        contract::holds(RedisDirectory::new(&address).unwrap()).await;
    }

    #[tokio::test]
    #[ignore = "needs redis-server: cluster/tests/redis/run"]
    async fn a_directory_with_tls_that_restarts_is_used_again() {
        let mut server = Server::start_with_tls().await;
        let address = address(&server, server.folder());
        let directory = Limited::new(RedisDirectory::new(&address).unwrap());
        let live = LiveInstance::begin(directory, 1, 100);
        live.until_consistent().await;
        server.kill().await;
        live.until_not_consistent().await;
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
    async fn a_certificate_of_another_authority_is_not_trusted_and_is_named_in_the_log() {
        let server = Server::start_with_tls().await;
        let other = server.folder().join("other");
        fs::create_dir_all(&other).unwrap();
        certify(&other).await;
        let pem = fs::read(other.join("ca.pem")).unwrap();
        let warnings = Warnings::watch();
        let url = format!("rediss://127.0.0.1:{}", server.port());
        let member = Cluster::redis(url).tls_root_certificate(pem);
        let member = member.advertise("10.0.0.7:9000").connect().await;
        assert!(member.is_ok(), "the directory counts as unreachable");
        assert!(warnings.count("certificate") > 0);
        let untrusted = Limited::new(RedisDirectory::new(&address(&server, &other)).unwrap());
        untrusted.leases().await.unwrap_err();
    }
}
